"""`ladder serve` as its clients see it: OpenAI's own, and those who send anything else."""

import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from ladder import LLM, SamplingParams
from ladder.checkpoint import SINGLE
from ladder.engine.requests import Request, TokenLogprobs
from ladder.engine.setup import Setup
from ladder.server.logprobs import TokenTexts, chat_logprobs, completion_logprobs
from tests.bodies import mutated
from tests.checkpoints import byte_tokenizer, tiny
from tests.serving import Listening, Scripted, listening, setup_of, wait_for

TEMPLATE = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no orders') }}{% endif %}"
TEMPLATE += "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
ASK: dict[str, Any] = {"prompt": "abc", "max_tokens": 8, "temperature": 0}
SAY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny(tmp_path_factory.mktemp("model"), eos=(), layers=2)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def setup(model: Path) -> Setup:
    return setup_of(model)


@pytest.fixture(scope="module")
def real(setup: Setup) -> Iterator[Listening]:
    """A model in a process of its own."""
    with listening(setup) as server:
        yield server


@pytest.fixture(scope="module")
def client(real: Listening) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=real.v1, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def scripted(setup: Setup) -> Iterator[Listening]:
    """No model: a sequence takes 2 ms a token."""
    with listening(setup, lambda: Scripted(pace=0.002), max_body=20_000) as server:
        yield server


# --- OpenAI's client --------------------------------------------------------------------------------------------------


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("large")


def test_completions_are_the_engines(client: openai.OpenAI, model: Path, setup: Setup) -> None:
    with LLM(model) as llm:
        expected = llm.generate(["abc", "de"], SamplingParams(20, 0.9, seed=5, n=2))
    answer = client.completions.create(
        model="tiny", prompt=["abc", "de"], max_tokens=20, temperature=0.9, seed=5, n=2, user="me"
    )
    assert [choice.text for choice in answer.choices] == [result.text for result in expected]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert {choice.finish_reason for choice in answer.choices} == {"length"} and answer.object == "text_completion"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 80, 85)
    ids = client.completions.create(model="tiny", prompt=[64, 65, 66], max_tokens=20, temperature=0, echo=True)
    with LLM(model) as llm:
        plain = llm.generate([[64, 65, 66]], SamplingParams(20))[0]
    assert ids.choices[0].text == "abc" + (plain.text or "")


def test_streams_add_up(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": ["abc", "x"], "max_tokens": 30, "seed": 3, "n": 2}
    whole = client.completions.create(**asked)
    texts, ends, usage = [""] * 4, [""] * 4, None
    for part in client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        assert part.id.startswith("cmpl-") and usage is None
        for choice in part.choices:
            texts[choice.index] += choice.text
            ends[choice.index] = choice.finish_reason or ends[choice.index]
        usage = part.usage
    assert texts == [choice.text for choice in whole.choices] and ends == ["length"] * 4
    assert usage == whole.usage


def test_chats(client: openai.OpenAI, model: Path) -> None:
    with LLM(model) as llm:
        expected = llm.generate(["<user>hi<assistant>"], SamplingParams(12))[0]
    asked: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_completion_tokens": 12}
    for content in ("hi", [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]):
        answer = client.chat.completions.create(messages=[{"role": "user", "content": content}], **asked)  # type: ignore[call-overload]
        message = answer.choices[0].message
        assert (message.role, message.content) == ("assistant", expected.text)
        assert answer.usage.prompt_tokens == expected.prompt_tokens
    parts = list(client.chat.completions.create(messages=SAY["messages"], stream=True, **asked))
    assert parts[0].choices[0].delta.role == "assistant" and parts[-1].choices[0].finish_reason == "length"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == expected.text
    with pytest.raises(openai.BadRequestError, match="chat template refuses this conversation: no orders"):
        client.chat.completions.create(messages=[{"role": "system", "content": "sit"}], **asked)


def test_stop_texts_and_vllms_fields(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt="abc", max_tokens=40, temperature=0).choices[0].text
    stop = whole[len(whole) // 2 :][:2]
    answer = client.completions.create(model="tiny", prompt="abc", max_tokens=40, temperature=0, stop=[stop, "@@@@"])
    assert answer.choices[0].text == whole[: whole.index(stop)] and answer.choices[0].finish_reason == "stop"
    extra = {"top_k": 1, "min_p": 0.1, "repetition_penalty": 1.0, "stop_token_ids": [], "min_tokens": 2}
    answer = client.completions.create(
        model="tiny", prompt="abc", max_tokens=40, temperature=1.0, extra_body={**extra, "ignore_eos": True}
    )
    assert answer.choices[0].text == whole


def test_no_chat_template(tmp_path: Path) -> None:
    with listening(setup_of(tiny(tmp_path, layers=2)), Scripted) as server:
        answer = httpx.post(f"{server.v1}/chat/completions", json=SAY)
    assert answer.status_code == 400 and "no chat template" in answer.json()["error"]["message"]


# --- logprobs ---------------------------------------------------------------------------------------------------------


def test_logprobs_over_http(scripted: Listening) -> None:
    with openai.OpenAI(base_url=scripted.v1, api_key="none") as client:
        chat = client.chat.completions.create(
            model="tiny", messages=SAY["messages"], max_tokens=3, logprobs=True, top_logprobs=2
        )
        content = chat.choices[0].logprobs.content  # type: ignore[union-attr]
        assert content is not None and "".join(one.token for one in content) == chat.choices[0].message.content
        assert [len(one.top_logprobs) for one in content] == [2, 2, 2] and content[0].logprob == -0.5
        assert content[0].bytes == list(content[0].token.encode())
        parts = client.completions.create(model="tiny", prompt="abc", max_tokens=5, logprobs=1, stream=True)
        logprobs = [part.choices[0].logprobs for part in parts]
        tokens = [token for one in logprobs if one is not None for token in one.tokens or []]
        offsets = [offset for one in logprobs if one is not None for offset in one.text_offset or []]
        assert len(tokens) == 5 and offsets == [0, 1, 2, 3, 4]
        whole = client.completions.create(model="tiny", prompt="abc", max_tokens=5, logprobs=1).choices[0]
        assert whole.logprobs is not None and "".join(tokens) == whole.text
        assert whole.logprobs.top_logprobs == [{token: -0.5} for token in tokens]


def test_logprobs_of_a_long_answer_take_no_time(setup: Setup) -> None:
    """They are written by the thread that serves all clients."""
    texts, begin = TokenTexts(setup.tokenizer), time.process_time()
    found = completion_logprobs(texts, [TokenLogprobs(97 - 33 + n % 26, -0.5) for n in range(50_000)], 7)
    assert time.process_time() - begin < 5
    assert found is not None and found["text_offset"] == list(range(7, 50_007))


def test_logprobs_of_parts_of_characters(setup: Setup) -> None:
    texts = TokenTexts(setup.tokenizer)
    given = [TokenLogprobs(64, float("-inf"), ((64, -1.0), (94, -2.0), (95, -3.0)))]
    chat = chat_logprobs(texts, given)
    assert chat is not None and chat["content"][0]["logprob"] == -9999.0
    assert chat["content"][0]["top_logprobs"][1]["bytes"] is None  # half of a character
    plain = completion_logprobs(texts, given)
    assert plain is not None and plain["top_logprobs"] == [{"a": -1.0, "\ufffd": -2.0}]
    assert chat_logprobs(texts, None) is None and completion_logprobs(texts, None) is None


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path, body, status, found", [
    ("completions", {**ASK, "model": "large"}, 404, "'large' does not exist"),
    ("completions", {**ASK, "max_token": 1}, 400, "unknown field 'max_token'; the nearest is 'max_tokens'"),
    ("completions", {"max_tokens": 1}, 400, "prompt must be"),
    ("completions", {**ASK, "prompt": []}, 400, "prompt must be"),
    ("completions", {**ASK, "prompt": ""}, 400, "prompt 0 is empty"),
    ("completions", {**ASK, "prompt": [[]]}, 400, "prompt 0 is empty"),
    ("completions", {**ASK, "prompt": [1, True]}, 400, "prompt must be"),
    ("completions", {**ASK, "prompt": [10**9]}, 400, "vocabulary"),
    ("completions", {**ASK, "prompt": "\ud800"}, 400, "UTF-8"),
    ("completions", {**ASK, "prompt": "x" * 600}, 400, "context of 512"),
    ("completions", {**ASK, "prompt": ["x"] * 129}, 400, "at most 128 prompts"),
    ("completions", {**ASK, "max_tokens": 0}, 400, "max_tokens must be from 1"),
    ("completions", {**ASK, "max_tokens": 1.5}, 400, "max_tokens must be a whole number"),
    ("completions", {**ASK, "temperature": "1"}, 400, "temperature must be a number"),
    ("completions", {**ASK, "temperature": -1}, 400, "temperature must be 0 or more"),
    ("completions", {**ASK, "top_p": 0}, 400, "top_p must be"),
    ("completions", {**ASK, "n": 1000}, 400, "n must be from 1 to 128"),
    ("completions", {**ASK, "stop": [""]}, 400, "stop must not"),
    ("completions", {**ASK, "stop": ["a"] * 17}, 400, "at most 16 texts"),
    ("completions", {**ASK, "logit_bias": {f"{n:05}": 1 for n in range(1025)}}, 400, "1025 tokens: at most 1024"),
    ("completions", {**ASK, "logprobs": 21}, 400, "logprobs must be from 0 to 20"),
    ("completions", {**ASK, "logprobs": 1, "echo": True}, 400, "echo together with logprobs"),
    ("completions", {**ASK, "logit_bias": {"x": 1}}, 400, "logit_bias must be"),
    ("completions", {**ASK, "logit_bias": {"1": 1000}}, 400, "logit_bias must"),
    ("completions", {**ASK, "logit_bias": {"999999": 1}}, 400, "logit_bias has the token 999999"),
    ("completions", {**ASK, "presence_penalty": 3}, 400, "presence_penalty must be"),
    ("completions", {**ASK, "min_tokens": 9}, 400, "min_tokens is 9, more than max_tokens"),
    ("completions", {**ASK, "best_of": 2}, 400, "best_of is not supported"),
    ("completions", {**ASK, "suffix": "x"}, 400, "suffix is not supported"),
    ("completions", {**ASK, "stream": 1}, 400, "stream must be true or false"),
    ("completions", {**ASK, "stream_options": {}}, 400, "stream_options needs stream"),
    ("completions", {**ASK, "stream": True, "stream_options": {"x": 1}}, 400, "unknown field 'stream_options.x'"),
    ("chat/completions", {**SAY, "messages": []}, 400, "messages must be"),
    ("chat/completions", {**SAY, "messages": [{"role": "user"}]}, 400, "messages[0].content must be"),
    ("chat/completions", {**SAY, "messages": [{"role": "x", "content": "y"}]}, 400, "messages[0].role must be one of"),
    ("chat/completions", {**SAY, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "'text'"),
    ("chat/completions", {**SAY, "tools": [{}]}, 400, "tools is not supported"),
    ("chat/completions", {**SAY, "functions": [{}]}, 400, "functions is not supported"),
    ("chat/completions", {**SAY, "response_format": {"type": "json_object"}}, 400, "response_format is not supported"),
    ("chat/completions", {**SAY, "top_logprobs": 1}, 400, "top_logprobs needs logprobs"),
    ("chat/completions", {**SAY, "prompt": "x"}, 400, "unknown field 'prompt'"),
])  # fmt: skip
def test_bad_bodies(scripted: Listening, path: str, body: dict[str, Any], status: int, found: str) -> None:
    answer = httpx.post(f"{scripted.v1}/{path}", content=json.dumps(body), headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert answer.status_code == status and found in error["message"], error
    assert error.keys() == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"


def test_harmless_values_of_unsupported_fields(scripted: Listening) -> None:
    body = {**SAY, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "user": "me", "store": True}
    body |= {"metadata": {"a": "b"}, "service_tier": "auto", "logit_bias": None, "stop": None, "n": 1.0}
    assert httpx.post(f"{scripted.v1}/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize("body, status, found", [
    (b"", 400, "not valid JSON"), (b"\xff", 400, "not valid JSON"), (b"[1]", 400, "must be a JSON object"),
    (b'{"prompt": "a", "prompt": "b"}', 400, "twice"), (b'{"temperature": NaN}', 400, "NaN is no number"),
    (b'{"n": ' + b"9" * 5000 + b"}", 400, "not valid JSON"), (b'{"n": 1e999, "prompt": "a"}', 400, "n must be"),
    (b'{"prompt": ' + b"[" * 9000 + b"]" * 9000 + b"}", 400, "inside each other"),
    (b'{"prompt": ' + b"[" * 20 + b"]" * 20 + b"}", 400, "inside each other"),
    (b'{"prompt": "' + b"x" * 20_000 + b'"}', 413, "more than 20000 bytes"),
])  # fmt: skip
def test_bytes_that_are_no_body(scripted: Listening, body: bytes, status: int, found: str) -> None:
    answer = httpx.post(f"{scripted.v1}/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status and found in answer.json()["error"]["message"]
    parts = httpx.post(f"{scripted.v1}/completions", content=iter([body]), headers={"content-type": "application/json"})
    assert parts.status_code == status  # sent in chunks, without a length


def test_other_requests(scripted: Listening) -> None:
    text = httpx.post(f"{scripted.v1}/completions", content=b"{}", headers={"content-type": "text/plain"})
    assert text.status_code == 415 and "application/json" in text.json()["error"]["message"]
    assert httpx.get(f"{scripted.v1}/completions").status_code == 405
    assert httpx.get(f"{scripted.v1}/nothing").json()["error"]["message"] == "GET /v1/nothing does not exist"
    large = httpx.get(f"{scripted.url}/health", headers={"x": "y" * 100_000})
    assert large.status_code == 431


def test_mutated_bodies(scripted: Listening) -> None:
    """Whatever is sent: an answer, or a client's mistake with its sentence. No failure, nothing left."""
    chance, statuses = random.Random(0), []
    with httpx.Client(headers={"content-type": "application/json"}) as client:
        for _ in range(300):
            path, body = mutated(chance)
            answer = client.post(f"{scripted.v1}/{path}", content=body)
            statuses.append(answer.status_code)
            assert answer.status_code in (200, 400, 404, 413, 429), (body, answer.text)
            if answer.status_code != 200:
                assert answer.json()["error"]["message"]
    assert min(statuses.count(200), statuses.count(400)) > 20
    wait_for(lambda: scripted.llm.open == 0)
    assert scripted.llm.failures == 0


def test_api_key(setup: Setup, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    for options in ({"api_key": "secret"}, {"api_key_file": tmp_path / "key"}):
        with listening(setup, Scripted, **options) as server:
            for headers in ({}, {"authorization": "Bearer secreT"}, {"authorization": "secret"}):
                answer = httpx.get(f"{server.v1}/models", headers=headers)
                assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error"
            assert httpx.get(f"{server.url}/health").status_code == 200
            with openai.OpenAI(base_url=server.v1, api_key="secret") as client:
                assert client.completions.create(model="tiny", prompt="a", max_tokens=2).choices[0].text


# --- queues, time-outs, clients that leave ----------------------------------------------------------------------------


def test_the_queue_is_limited(model: Path) -> None:
    with listening(setup_of(model, max_num_seqs=2), lambda: Scripted(2, 0.01), max_queue=1) as server:
        url, many = f"{server.v1}/completions", {**ASK, "max_tokens": 100}
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: httpx.post(url, json=many, timeout=30), range(8)))
        statuses = [answer.status_code for answer in answers]
        assert statuses.count(200) == 3 and statuses.count(429) == 5
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.headers["retry-after"] == "1" and refused.json()["error"]["code"] == "queue_full"
        assert "at most 3" in httpx.post(url, json={**ASK, "n": 4}).json()["error"]["message"]
        assert httpx.post(url, json=ASK).status_code == 200


def test_time_outs(setup: Setup) -> None:
    with listening(setup, lambda: Scripted(pace=0.01), request_timeout=0.5) as server:
        url, long = f"{server.v1}/completions", {**ASK, "max_tokens": 400}
        answer = httpx.post(url, json=long)
        assert answer.status_code == 504 and answer.json()["error"]["type"] == "timeout"
        with httpx.stream("POST", url, json={**long, "stream": True}) as stream:
            events = [line for line in stream.iter_lines() if line]
        assert stream.status_code == 200 and "longer than 0.5 s" in events[-1] and "[DONE]" not in events[-1]
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as slow:  # half of a body
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
            slow.sendall(b"content-length: 100\r\n\r\n{")
            assert slow.recv(100).startswith(b"HTTP/1.1 504")
        assert server.llm.open == 0


def test_a_client_that_leaves_is_forgotten(setup: Setup) -> None:
    cancelled, body = 'ladder_requests_total{outcome="cancelled"}', {**ASK, "max_tokens": 500}
    with listening(setup, lambda: Scripted(pace=0.02)) as server:  # ten seconds
        with httpx.stream("POST", f"{server.v1}/completions", json={**body, "stream": True}) as answer:
            assert next(answer.iter_lines()).startswith("data: {") and server.llm.open == 1
        wait_for(lambda: server.llm.open == 0, 5.0)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.v1}/completions", json=body, timeout=0.5)
        wait_for(lambda: server.llm.open == 0, 5.0)
        wait_for(lambda: metric(server, cancelled) == 2)


def metric(server: Listening, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return next(float(line.removeprefix(name)) for line in lines if line.startswith(f"{name} "))


def test_metrics(setup: Setup) -> None:
    with listening(setup, lambda: Scripted(pace=0.005)) as server:
        assert httpx.post(f"{server.v1}/completions", json={**ASK, "n": 2}).status_code == 200
        assert httpx.post(f"{server.v1}/completions", json={}).status_code == 400
        for name, value in (
            ('ladder_requests_total{outcome="ok"}', 1),
            ('ladder_requests_total{outcome="refused"}', 1),
            ("ladder_prompt_tokens_total", 3),
            ("ladder_generated_tokens_total", 16),
            ("ladder_time_to_first_token_seconds_count", 2),
            ("ladder_inter_token_seconds_count", 14),
            ("ladder_request_seconds_count", 1),
            ("ladder_sequences_running", 0),
            ("ladder_sequences_waiting", 0),
            ("ladder_engine_ready", 1),
        ):
            assert metric(server, name) == value, name


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_model_whose_output_is_not_finite(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tiny(tmp_path, layers=2)
    tensors = load_file(tmp_path / SINGLE)
    tensors["model.embed_tokens.weight"][200] = torch.nan
    save_file(tensors, tmp_path / SINGLE)
    with LLM(tmp_path) as llm:
        executor = llm._executor
        with listening(llm.setup, lambda: executor) as server:
            body = {**ASK, "prompt": [200, 7]}
            answer = httpx.post(f"{server.v1}/completions", json=body)
            assert answer.status_code == 500 and "not finite" in answer.json()["error"]["message"]
            streamed = httpx.post(f"{server.v1}/completions", json={**body, "stream": True})
            assert "not finite" in streamed.text and "[DONE]" not in streamed.text
            assert httpx.post(f"{server.v1}/completions", json=ASK).status_code == 200


def test_a_bug_is_an_error_of_one_request(scripted: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Request, "result", lambda request: 1 / 0)
    answer = httpx.post(f"{scripted.v1}/completions", json=ASK)
    monkeypatch.undo()
    assert answer.status_code == 500 and "division" not in answer.text
    assert httpx.post(f"{scripted.v1}/completions", json=ASK).status_code == 200


def test_grace(setup: Setup) -> None:
    """A request that runs when the server is asked to end is finished in the time there is, or told."""
    for grace, count in ((20.0, 100), (0.3, 500)):
        answers: list[httpx.Response] = []
        with listening(setup, lambda: Scripted(pace=0.01), grace=grace) as server:
            body = {**ASK, "max_tokens": count}

            def ask(url: str = server.v1, body: dict[str, Any] = body, into: list[httpx.Response] = answers) -> None:
                into.append(httpx.post(f"{url}/completions", json=body, timeout=30))

            thread = threading.Thread(target=ask)
            thread.start()
            wait_for(lambda server=server: server.llm.open == 1)  # type: ignore[misc]
        thread.join()
        assert answers[0].status_code == (200 if grace > 1 else 503)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")


def test_a_request_that_does_not_fit_the_cache(setup: Setup) -> None:
    with listening(setup, lambda: Scripted(room=20)) as server:
        found = httpx.post(f"{server.v1}/completions", json={"prompt": [1] * 10, "max_tokens": 11})
        assert found.status_code == 400 and "does not fit into the KV cache" in found.json()["error"]["message"]
        assert httpx.post(f"{server.v1}/completions", json={"prompt": [1] * 10, "max_tokens": 9}).status_code == 200


def test_a_chat_of_any_length_has_what_the_cache_has(setup: Setup) -> None:
    """A model's context may be longer than the cache: who says no length is not to blame for that."""
    with listening(setup, lambda: Scripted(room=20)) as server:
        found = httpx.post(f"{server.v1}/chat/completions", json={**SAY, "max_tokens": None}).json()
        usage = found["usage"]
        assert found["choices"][0]["finish_reason"] == "length" and usage["total_tokens"] == 20
        for limit in (20, 20 - usage["prompt_tokens"]):
            said = httpx.post(f"{server.v1}/chat/completions", json={**SAY, "max_tokens": limit})
            assert said.status_code == (400 if limit == 20 else 200)
        long = {"messages": [{"role": "user", "content": "hi" * 20}]}
        refused = httpx.post(f"{server.v1}/chat/completions", json=long)
        assert refused.status_code == 400 and "does not fit into the KV cache" in refused.json()["error"]["message"]
