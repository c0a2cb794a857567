"""Long work: how its progress is told, and processes that share it."""

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from typing import Any

Progress = Callable[[int, int, str], None]  # done, of how many, what is being done


@contextmanager
def workers(count: int) -> Iterator[Callable[..., Future[Any]]]:
    """A function that has other processes work. Whatever ends the block early ends them at once: a pool by itself
    completes all that was submitted. Ctrl-C reaches this process alone, which ends the others.
    """
    others = set(active_children())
    with ProcessPoolExecutor(count, get_context("spawn")) as pool:

        def submit(work: Callable[..., Any], *arguments: Any) -> Future[Any]:
            before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))  # which a new process keeps
            try:
                return pool.submit(work, *arguments)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

        try:
            yield submit
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in set(active_children()) - others:
                worker.terminate()
            raise
