"""`ladder chat`."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ladder.chat.options import ChatOptions, ChatSampling, LocalOptions
from ladder.cli.verbs import verb, weights_bar
from ladder.engine.early import prepared
from ladder.errors import LadderError


@verb(ChatOptions, LocalOptions, ChatSampling)
def chat(options: ChatOptions, engine: LocalOptions, sampling: ChatSampling, named: frozenset[str]) -> None:
    """Talk with a local model or an OpenAI-compatible endpoint. From a pipe: one line per turn."""
    from ladder.chat.terminal import Terminal

    if options.remote is None:
        _local(options, engine, sampling, Terminal())
        return
    if local := sorted(named & {field.name for field in fields(LocalOptions)}):
        raise LadderError(f"--{local[0].replace('_', '-')} is for local models, not for the endpoint {options.remote}")
    from ladder.chat.conversation import Conversation
    from ladder.chat.remote import RemotePartner
    from ladder.client.endpoint import Endpoint

    endpoint = Endpoint.parse(options.remote, options.api_key)
    with RemotePartner(endpoint, options.name, _given(sampling, named)) as partner:
        Conversation(partner, Terminal(), options.system).run()


def _local(options: ChatOptions, engine: LocalOptions, sampling: ChatSampling, terminal: Any) -> None:
    model = engine.model if options.target is None else Path(options.target)
    prepared_options = prepared(replace(engine, model=model))
    from ladder.chat.conversation import Conversation  # torch takes seconds to import
    from ladder.chat.local import LocalPartner, check
    from ladder.engine.llm import LLM
    from ladder.engine.setup import Setup

    setup = Setup(prepared_options)
    check(setup)
    with weights_bar(setup.weight_bytes) as progress:
        llm = LLM.load(setup, progress)
    with llm:
        Conversation(LocalPartner(llm, sampling), terminal, options.system).run()


def _given(sampling: ChatSampling, named: frozenset[str]) -> dict[str, Any]:
    """The options that were given, under the names that endpoints know."""
    known = {field.name: getattr(sampling, field.name) for field in fields(ChatSampling) if field.name in named}
    return {"max_tokens" if name == "max_new_tokens" else name: value for name, value in known.items()}
