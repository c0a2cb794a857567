"""Options of `ladder serve`."""

import math
from dataclasses import dataclass
from pathlib import Path

from ladder.config.fields import read_text
from ladder.errors import LadderError, check_known
from ladder.options import check_least, check_types, option

ENGINES = ("native", "vllm")


@dataclass(frozen=True)
class ServerOptions:
    """Where the server listens, what it accepts, and when it gives up."""

    engine: str = option("native", "What computes: native, or vllm, which takes its own options as well.")
    served_model_name: str | None = option(None, "The model's name in requests; default: its directory's name.")
    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 is every interface of this machine.")
    port: int = option(8000, "Port to listen on; 0: a free one, which is printed.")
    api_key: str | None = option(None, "Requests must have this key. Other users of this machine can see it here.")
    api_key_file: Path | None = option(None, "A file with the key, which they cannot see.")
    warm_up: bool = option(True, "On a GPU: compile and capture what decoding needs before requests are accepted.")
    max_body: int = option(4 * 2**20, "Bytes of a request's body, at most.")
    max_queue: int = option(256, "Sequences that wait while others run, at most; further requests get status 429.")
    request_timeout: float = option(600.0, "Seconds after which a request is ended with an error.")
    grace: float = option(30.0, "Seconds for running requests to finish when the server is asked to end.")
    restarts: int = option(5, "Failures of ranks in a row, without a finished request, after which the server ends.")

    def __post_init__(self) -> None:
        check_types(self)
        check_known("engine", self.engine, ENGINES)
        if not 0 <= self.port <= 65535:
            raise LadderError(f"port must be from 0 to 65535, not {self.port}")
        check_least(self, max_body=1, max_queue=0, restarts=0)
        if not (math.isfinite(self.request_timeout) and self.request_timeout > 0):
            raise LadderError(f"request-timeout must be above 0 seconds, not {self.request_timeout}")
        if not (math.isfinite(self.grace) and self.grace >= 0):
            raise LadderError(f"grace must be 0 seconds or more, not {self.grace}")
        if self.api_key is not None and self.api_key_file is not None:
            raise LadderError("both --api-key and --api-key-file were given: give one of them")
        if self.served_model_name == "":
            raise LadderError("served-model-name must not be empty")

    def key(self) -> str | None:
        """The key that requests must have; None where they need none."""
        key = self.api_key if self.api_key_file is None else read_text(self.api_key_file).strip()
        if key is not None and not (key and key.isascii() and key.isprintable()):
            where = "--api-key" if self.api_key_file is None else str(self.api_key_file)
            raise LadderError(f"the key in {where} must be printable ASCII, and not empty")
        return key
