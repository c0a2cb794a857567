"""Where processes for ranks come from."""

import signal
from multiprocessing import forkserver, get_context, resource_tracker
from multiprocessing.context import ForkServerContext


def nursery(*more: str) -> ForkServerContext:
    """A clean process that loads torch, and modules `more`, once for all ranks, which are forked from it, now and
    later, with the variables it was started with. It does not hear Ctrl-C: that is the caller's business.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(["ladder.engine.rank", *more])
    resource_tracker.ensure_running()  # would unblock what is blocked next, were it started after that
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
    return context
