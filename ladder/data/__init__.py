"""Token shards: documents to tokens, tokens on disk, windows over them."""
