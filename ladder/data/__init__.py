"""Token shards: documents to tokens, tokens on disk, sequences from them."""
