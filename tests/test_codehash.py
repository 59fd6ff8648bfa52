"""The hashes that say which code computes a run's loss: what they depend on, and what is said where they differ."""

import json
import shutil

import pytest
from conftest import ROOT, TINY, command, slow

import codehash
from config import make_configs
from runs import read_run

CODE = '''
class Encoding:
    """Words."""
    theta: float = setting(0.5, "help", above=0)

    def table(self, n, width=8):
        """More words."""
        if n < 0:
            raise InputError(f"n must be {n:>{width}} or more")
        return n * self.theta, f"{n!r:{width}} and {{}}"       # a comment

def other():
    return 1
'''


def test_a_hash_is_of_what_is_computed(tmp_path):
    path = tmp_path / "code.py"

    def hash_of(text, classes=None):
        path.write_bytes(text.encode())
        return codehash.hash_code(path, classes)

    same = [("Words", "Other words"), ("# a comment", "# another"), ("\n", "\r\n"), ('"help"', '"more help"'),
            ("above=0", "above=1"), ("n must be", "give an n of"), ("\n\n", "\n\n\n"), ("0.5", "5e-1"),
            ("    ", "  "), ("(self, n, width=8)", "(self, n,\n    width=8)")]
    other = [("0.5", "0.6"), ("n * ", "n + "), ("n < 0", "n < 1"), ("and {{}}", "or {{}}"), ("width=8", "width=9"),
             ("return 1", "return 1.0")]
    assert all(old in CODE for old, _ in same + other)
    assert {hash_of(CODE.replace(*change)) for change in same} == {hash_of(CODE)}
    changed = {hash_of(CODE.replace(*change)) for change in other}
    assert len(changed) == len(other) and hash_of(CODE) not in changed
    assert hash_of(CODE) == "6c0a2081cd45"                                   # from any Python, on any machine
    of_class = hash_of(CODE, {"Encoding"})
    assert hash_of(CODE.replace("return 1", "return 2"), {"Encoding"}) == of_class != hash_of(CODE)
    assert hash_of(CODE.replace("0.5", "0.6"), {"Encoding"}) != of_class


def test_settings_count_with_the_classes_of_a_runs_encodings_alone(tmp_path, monkeypatch):
    shutil.copytree(ROOT, tmp_path / "code", ignore=lambda folder, names: [n for n in names if not n.endswith(".py")])
    monkeypatch.setattr(codehash, "ROOT", tmp_path / "code")
    text = (ROOT / "positional_encodings.py").read_text(encoding="utf-8")

    def config_of(pe, text):
        (tmp_path / "code/positional_encodings.py").write_text(text, encoding="utf-8")
        return codehash.code_of(*make_configs("mini", pe))["positional_encodings.py"]

    for old, new, changed in [("overridden dimensions", "dimensions", ()),
                              ("self.slopes * (d", "2 * self.slopes * (d", ("alibi",)),
                              ("64 / context if", "65 / context if", ("expe",))]:
        assert old in text
        for pe in ("expe", "alibi", "rope"):
            same = config_of(pe, text.replace(old, new)) == config_of(pe, text)
            assert same == (pe not in changed), (old, pe)


@pytest.mark.parametrize("pe, flags, files", [
    ("expe", {}, ["model_torch.py"]), ("rope", {"backend": "numpy"}, ["model_numpy.py"]),
    ("rope", {"fast": True}, ["model_torch.py", *codehash.FAST]),
    ("fox", {}, ["model_torch.py", "zoo/fox.py"]),
    ("path_fox", {}, ["model_torch.py", "zoo/path_fox.py", "zoo/path.py", "zoo/fox.py", "zoo/selective_rope.py"]),
    ("cable", {"softmax": "sinks"}, ["model_torch.py", "zoo/cable.py", "zoo/fox.py", "zoo/softmax.py"]),
    ("expe", {"learn": "init"}, ["model_torch.py", "zoo/ablations.py"]),
    ("rope", {"cycle": "rope:window=8,proportional"}, ["model_torch.py", "zoo/cycle.py", "zoo/proportional.py"]),
    ("rope", {"norm": "rmsnorm"}, ["model_torch.py"]),
    ("rope", {"norm": "rmsnorm", "backend": "numpy"}, ["model_numpy.py", "zoo/llama.py"])])
def test_the_files_are_those_that_the_run_uses(pe, flags, files):
    hashes = codehash.code_of(*make_configs("mini", pe, **flags))
    assert sorted(hashes) == sorted(["positional_encodings.py", "expe.py", *files]) and "missing" not in hashes.values()


def edit(run, **code):
    """Write other hashes, or none, in a run's config.json."""
    record = json.loads((run / "config.json").read_text())
    if code:
        record["provenance"]["code"] |= code
    else:
        del record["provenance"]["code"]
    (run / "config.json").write_text(json.dumps(record))


@pytest.mark.parametrize("line", [
    "eval.py runs/expe --lengths 16", "generate.py runs/expe",
    *slow("lab.measure runs/expe --lengths 16 --dtype fp32,bf16", "generate.py runs/expe --cache --tokens 2",
          "lab.attention runs/expe --out a.png", "lab.curves runs/expe --out a.png")])
def test_what_prints_a_number_names_code_that_has_changed_since(line, workplace, tmp_path):
    def said():
        done = command(*line.split(), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stderr

    shutil.copytree(workplace / "runs/expe", tmp_path / "runs/expe")
    assert said() == ""
    edit(tmp_path / "runs/expe", **{"expe.py": "0" * 12, "zoo/gone.py": "1" * 12})
    assert said() == "runs/expe: it was trained with other code than is here now: expe.py, zoo/gone.py\n"
    edit(tmp_path / "runs/expe")                                        # as in an older run
    assert said() == ""


def test_a_run_that_goes_on_with_other_code_says_so_and_records_both(tokens, tmp_path, monkeypatch, stop_at):
    flags = ["train.py", "--pe", "rope", *TINY, "--steps", "8", "--data", tokens, "--out", "run"]

    def train(*more):
        done = command(*flags, *more, cwd=tmp_path)
        return done.stdout, json.loads((tmp_path / "run/config.json").read_text())["provenance"]["code"]

    stop_at(3)
    _, began = train()
    assert began == codehash.code_of(*read_run(tmp_path / "run")[:2])
    monkeypatch.undo()
    shutil.copytree(ROOT, tmp_path / "code", ignore=lambda folder, names: [n for n in names if not n.endswith(".py")])
    model = tmp_path / "code/model_torch.py"
    model.write_text(model.read_text(encoding="utf-8") + "\nlast = 1\n", encoding="utf-8")
    with monkeypatch.context() as patch:
        patch.setattr(codehash, "ROOT", tmp_path / "code")
        stop_at(6)
        printed, code = train("--resume")
        monkeypatch.undo()
    now = codehash.hash_code(model)
    assert "run: it goes on with other code than it was trained with: model_torch.py\n" in printed
    assert code == began | {"model_torch.py": f"{began['model_torch.py']}, from step 4 {now}"}
    log = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert [line["resumed"]["code"]["model_torch.py"] for line in log if "resumed" in line] == [now]
    with monkeypatch.context() as patch:
        patch.setattr(codehash, "ROOT", tmp_path / "code")              # the same again: nothing new to say
        printed, again = train("--resume")
        assert "other code" not in printed and again == code
        said = command("eval.py", "run", "--lengths", "16", cwd=tmp_path).stderr
        assert said == ("run: it was trained with other code than is here now: model_torch.py (it changed at step "
                        "4)\n")


def test_hashes_of_an_edited_config_are_refused_in_one_line(workplace, tmp_path):
    shutil.copytree(workplace / "runs/expe", tmp_path / "run")
    edit(tmp_path / "run", **{"expe.py": 5})
    done = command("eval.py", "run", cwd=tmp_path)
    assert done.returncode == 2 and "run/config.json was edited: provenance.code must have a hash" in done.stderr


def test_a_file_that_is_split_off_or_dropped_has_the_step_from_which_that_holds():
    then = {"config.py": "a", "model_torch.py": "b"}
    now = {"positional_encodings.py": "c", "model_torch.py": "b"}
    marked = codehash.go_on(then, now, 7)
    assert marked == {"config.py": "a, from step 7 none", "model_torch.py": "b",
                      "positional_encodings.py": "none, from step 7 c"}
    assert codehash.differing(then, now) == ["config.py", "positional_encodings.py"]
    assert codehash.differing(marked, now) == ["config.py (it changed at step 7)",
                                               "positional_encodings.py (it changed at step 7)"]
    assert codehash.go_on(marked, now, 9) == marked and codehash.differing({}, now) == []
