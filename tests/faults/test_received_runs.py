"""A run folder from somebody: no command executes code because the folder names it."""

from __future__ import annotations

import json
import os
import py_compile
import shutil
import textwrap
from pathlib import Path

import pytest

import evenhand as eh
from cli.ways import train, write
from commands import evenhand, result
from evenhand.errors import EvenhandError
from evenhand.runs.folder import Folder
from evenhand.training.fit import resume

NETS = """
    from pathlib import Path

    import torch

    Path(__file__).with_name("executed").touch()

    def net(facts):
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3, len(facts.labels)))

    def other(facts):
        return net(facts)

    class Same(torch.nn.Module):
        def forward(self, x):
            return x
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    write(tmp_path)
    (tmp_path / "nets.py").write_text(textwrap.dedent(NETS))
    return tmp_path


def executed(project: Path) -> bool:
    """Whether code ran since the last question."""
    marks = [*project.rglob("executed")]
    for mark in marks:
        mark.unlink()
    return bool(marks)


COMMANDS = (
    ("predict", "run", "people.csv"),
    ("predict", "run", "people.csv", "--keep", "age", "--json"),
    ("resume", "run"),
    ("resume", "run", "--epsilon", 9, "--epochs", 1),
    ("train", "run/config.toml", "--epsilon", 3, "--out", "again"),
    ("compare", "run/config.toml", "--epsilons", 3, "--seeds", 1, "--out", "compared"),
)
FURTHER = (("report", "run"), ("verify", "run"), ("statement", "run"))
PLACES = ["absolute", *(pytest.param(name, marks=pytest.mark.slow) for name in ("inside", "relative", "above"))]


@pytest.mark.parametrize("setting", ["model", "features"])
@pytest.mark.parametrize("place", PLACES)
def test_no_command_executes_what_a_received_folder_names(project: Path, setting: str, place: str) -> None:
    assert train(project, "--model", "linear", "--json").returncode == 0
    run, config, elsewhere = project / "run", project / "run" / "config.toml", project / "elsewhere"
    elsewhere.mkdir()
    for folder in (elsewhere, run):
        shutil.copy(project / "nets.py", folder / "evil.py")
    named = {
        "absolute": elsewhere / "evil.py",
        "inside": run / "evil.py",
        "relative": "evil.py",
        "above": "../elsewhere/evil.py",
    }[place]
    factory = "net" if setting == "model" else "Same"
    text = config.read_text().replace('model = "linear"\n', "" if setting == "model" else 'model = "linear"\n')
    config.write_text(text.replace("method =", f'{setting} = "{named}:{factory}"\nmethod ='))
    for command in (*COMMANDS, *(FURTHER if place != "absolute" else ())):
        done = evenhand(*command, cwd=project)
        assert not executed(project), command
        assert done.returncode in (0, 1, 2, 3), command
        assert "Traceback" not in done.stderr
    for way in (lambda: eh.load(run).model, lambda: resume(run)):
        with pytest.raises(EvenhandError):
            way() if setting == "model" else resume(run)
        assert not executed(project)
    refused = evenhand("predict", "run", "people.csv", cwd=project)
    assert refused.returncode == 2
    assert "executed only if you name it" in refused.stderr
    flag = f"--{setting}"
    assert result("predict", "run", "people.csv", flag, f"nets.py:{factory}", cwd=project)["records"] == 80
    assert executed(project)


def test_a_run_of_this_machine_is_resumed_with_one_command_until_its_code_changes(project: Path) -> None:
    assert train(project, "--model", "nets.py:net", "--json").returncode == 0
    run, file = Folder(project / "run"), project / "nets.py"
    assert executed(project)
    longer = ("resume", "run", "--epsilon", 9, "--epochs", 1)
    assert evenhand(*longer, cwd=project).returncode == 0
    assert executed(project)
    config = run.path / "config.toml"
    text = config.read_text()
    config.write_text(text.replace("nets.py:net", "nets.py:other"))  # named by nobody
    refused = evenhand("resume", "run", "--epsilon", 12, "--epochs", 1, cwd=project)
    assert refused.returncode == 2
    assert not executed(project)
    config.write_text(text)
    file.write_text(file.read_text() + "\n# changed\n")
    refused = evenhand("resume", "run", cwd=project)
    assert refused.returncode == 2
    assert "counts as another" in refused.stderr
    assert not executed(project)
    done = evenhand("resume", "run", "--model", "nets.py:net", cwd=project)
    assert done.returncode == 0, done.stderr
    assert "digests differ" in done.stderr


def test_the_digest_is_in_the_run_and_a_difference_is_said(project: Path) -> None:
    assert train(project, "--model", "nets.py:net", "--json").returncode == 0
    recorded = json.loads((project / "run" / "preprocessing.json").read_bytes())["code"]
    assert recorded.keys() == {"model"}
    ask = ("predict", "run", "people.csv", "--model", "nets.py:net")
    assert evenhand(*ask, cwd=project).stderr == ""
    (project / "nets.py").write_text((project / "nets.py").read_text() + "\n# changed\n")
    assert "digests differ" in evenhand(*ask, cwd=project).stderr
    assert evenhand("verify", "run", cwd=project).returncode == 0


def test_a_compiled_copy_beside_the_file_is_not_executed_in_its_place(project: Path) -> None:
    file = project / "nets.py"
    good = file.read_text().replace('"executed"', '"good-one"')
    evil = file.read_text()
    assert len(good) == len(evil)
    py_compile.compile(str(file), doraise=True)
    about = file.stat()
    file.write_text(good)
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert train(project, "--model", "nets.py:net", "--json").returncode == 0
    assert not executed(project)
    assert (project / "good-one").exists()
