"""A small corpus of real text, its tokens, and the commands of the project as a user runs them."""

import contextlib
import hashlib
import importlib
import io
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import pytest

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")  # models as small as these are slower on two threads, on busy cores many times

# With this, torch's own kernels are those of an older processor, but oneDNN's are not, and bf16 needs both to agree.
# torch.compile's cache does not tell such code from that of the real processor.
if isa := {"default": "SSE41", "avx2": "AVX2"}.get(os.environ.get("ATEN_CPU_CAPABILITY")):
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", isa)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor-{isa}")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell starts what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that fixtures end the processes that they started

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import data  # noqa: E402  (the project is a folder of scripts, not a package)


def need(name):
    """Import an optional package. A test without it is skipped, or fails where REQUIRE_OPTIONAL is set (as in CI)."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if os.environ.get("REQUIRE_OPTIONAL"):
            raise
        pytest.skip(f"this test needs {name}: make setup-all ({error})", allow_module_level=True)


def slow(*cases):
    """The same cases of a parametrized test, with the mark slow; a case of several arguments is a tuple."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]


@pytest.fixture
def start_torchrun(start):
    """start_torchrun(n, ...): torchrun with n processes."""
    def start_with(n, *arguments, cwd):
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", n, "-m", "--"]
        return start([*words, "engine.distributed", *arguments], cwd=cwd, stderr=subprocess.STDOUT)

    return start_with


@pytest.fixture
def stop_at(monkeypatch):
    """stop_at(step): a Ctrl-C, or another signal, comes as that step's batch is drawn, until monkeypatch.undo()."""
    def stop(at, sent=signal.SIGINT):
        batch = data.batch

        def batch_that_is_stopped(tokens, context, n, seed, step):
            if step == at:
                signal.raise_signal(sent)
            return batch(tokens, context, n, seed, step)

        monkeypatch.setattr(data, "batch", batch_that_is_stopped)

    return stop


def read_log(run):
    """The lines of a run's log but for those that say where it was resumed."""
    return [line for line in (run / "log.jsonl").read_text().splitlines() if '"resumed"' not in line]


TINY = ["--preset", "mini", "--layers", "2", "--width", "64", "--context", "16", "--batch-size", "4", "--vocab", "300"]


def command(script, *arguments, cwd):
    """What `python SCRIPT ...` does in a folder, but within this process, since torch takes seconds to load.

    The script may be a module such as lab.bench, as in `python -m lab.bench`.
    """
    module, said, printed, status = importlib.import_module(script.removesuffix(".py")), io.StringIO(), io.StringIO(), 0
    argv, here = sys.argv, os.getcwd()
    try:
        sys.argv = [script, *map(str, arguments)]
        os.chdir(cwd)
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(printed):
            module.main()
    except SystemExit as exit:
        status = exit.code or 0
    finally:
        sys.argv = argv
        os.chdir(here)
    return subprocess.CompletedProcess(arguments, status, printed.getvalue(), said.getvalue())


def process(script, *arguments, cwd, **environment):
    """Run `python SCRIPT ...` or `python -m lab.NAME ...` in a folder, in a process; returns it once it has ended."""
    what = [ROOT / script] if script.endswith(".py") else ["-m", script]
    with group([sys.executable, *what, *arguments], cwd, environment) as started:
        printed, said = started.communicate(timeout=300)
    return subprocess.CompletedProcess(arguments, started.returncode, printed, said)


@contextlib.contextmanager
def group(words, cwd, environment=None, **how):
    """A process in a group of its own, which is killed at the end, with all that it has started.

    A signal to the group, os.killpg(pid, ...), comes as from a terminal.
    """
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | how
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | (environment or {})
    with subprocess.Popen([*map(str, words)], cwd=cwd, env=environment, start_new_session=True, **how) as started:
        try:
            yield started
        finally:
            with contextlib.suppress(ProcessLookupError):  # none of the group is left
                os.killpg(started.pid, signal.SIGKILL)  # workers in other groups, as torchrun's, end with their parent


@pytest.fixture
def start():
    """start(words, cwd=, ...): a process as group() starts it, until the test ends or is interrupted."""
    with contextlib.ExitStack() as stack:
        yield lambda words, **how: stack.enter_context(group(words, **how))


def wait_for(holds, running):
    """Wait until holds() is true, the process has ended, or two minutes have passed."""
    end = time.monotonic() + 120
    while not holds() and running.poll() is None and time.monotonic() < end:
        time.sleep(0.002)


def refused(done):
    """The one line that a refused command prints: nothing else on stderr, no traceback, exit status 2."""
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1 and ": error: " in lines[0], done.stderr
    return lines[0]


@pytest.fixture(scope="session")
def books(tmp_path_factory):
    """A folder of 80 texts: the beginnings of files of the standard library, as .txt."""
    folder = tmp_path_factory.mktemp("books") / "books"
    folder.mkdir()
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(p for p in library.glob("*.py") if p.stat().st_size > 6000)[:80]:
        (folder / f"{path.stem}.txt").write_text(path.read_text(encoding="utf-8")[:4000], encoding="utf-8")
    return folder


def split_of(text):
    """The split a text falls to: one fourteenth of all to val, one to test, by the first 64 bits of its SHA-256."""
    part = int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) * 14 >> 64
    return {0: "val", 1: "test"}.get(part, "train")


@pytest.fixture(scope="session")
def tokens(books, tmp_path_factory):
    """The books, prepared with a vocabulary of 300."""
    folder = tmp_path_factory.mktemp("tokens") / "books-v300"
    data.prepare(str(books), folder, 300, min_doc_tokens=256)
    return folder


@pytest.fixture(scope="session")
def workplace(tokens, tmp_path_factory):
    """A folder with one tiny run of three encodings under runs/, made by train.py."""
    folder = tmp_path_factory.mktemp("workplace")
    for pe in ("expe", "learned", "rope"):
        done = command(
            "train.py", "--pe", pe, *TINY, "--steps", "8", "--data", tokens, "--out", f"runs/{pe}", cwd=folder
        )
        assert done.returncode == 0, done.stderr
    return folder
