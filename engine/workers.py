"""What the worker processes of a command have in common: none outlives the process that started it."""

import os
import signal
import threading
import time


def end_with_parent(wait, seconds=10):
    """End this process once wait() returns, which waits for the end of its parent, whatever ends it.

    A training answers SIGTERM: it stops after its step, and keeps it. Whatever goes on for so many seconds is ended.
    """
    def end():
        wait()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(seconds)
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()

def leave_ctrl_c_to_parent():
    """Ignore the Ctrl-C that a terminal sends to the parent and its workers: the parent ends them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
