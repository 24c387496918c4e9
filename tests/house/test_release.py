"""What a release is made of: sdist and wheel that build and pass twine, recipes, templates, a changelog in its form."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
RECIPES = ROOT / ".github" / "workflows"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the sdist, built from this tree; without a network."""
    out = tmp_path_factory.mktemp("dist")
    line = [sys.executable, "-m", "build", "--no-isolation", "-o", str(out), str(ROOT)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_sdist_and_wheel_pass_twine(built: Path) -> None:
    files = sorted(built.iterdir())
    assert [file.suffix for file in files] == [".whl", ".gz"]
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *map(str, files)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("PASSED") == 2


def test_the_wheel_has_all_of_the_package_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "src" / "evenhand"
    sources = {f"evenhand/{file.relative_to(package)}" for file in package.rglob("*") if file.is_file()}
    expected = {name for name in sources if "__pycache__" not in name and not name.endswith(".so")}
    assert expected <= inside
    compiled = {name for name in inside if name.endswith(".so")}
    if shutil.which("cc"):
        assert compiled == {"evenhand/_noise.so", "evenhand/_dense.so", "evenhand/_recurrent.so"}
        assert "-py3-none-" in wheel.name
    assert {name.split("/")[0] for name in inside - expected - compiled} == {
        f"evenhand-{PROJECT['project']['version']}.dist-info"
    }


def test_the_sdist_has_what_its_tests_need_and_no_run_or_library(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "hatch_build.py", "tests/browser.py", "docs/conf.py"} <= inside
    assert [name for name in inside if name.endswith((".so", ".pt", ".lock")) or name.startswith("runs/")] == []
    assert sdist.stat().st_size < 8_000_000


def test_the_site_that_the_readme_builds_stays_out_of_git_and_sdist() -> None:
    (target,) = re.findall(r"`sphinx-build docs (\w+)`", (ROOT / "README.md").read_text())
    assert f"/{target}/" in (ROOT / ".gitignore").read_text().splitlines()


def steps(recipe: str) -> list[dict[str, Any]]:
    jobs = yaml.safe_load((RECIPES / recipe).read_text())["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


def test_the_recipes_make_wheels_for_every_system_and_publish_nothing() -> None:
    jobs = yaml.safe_load((RECIPES / "release.yml").read_text())["jobs"]
    systems = " ".join([*jobs["compiled"]["strategy"]["matrix"]["os"], jobs["pure"]["runs-on"]])
    assert all(system in systems for system in ("ubuntu", "arm", "macos", "windows"))
    assert any("cibuildwheel" in step.get("uses", "") for step in steps("release.yml"))
    assert [step["run"] for step in steps("ci.yml") if "run" in step][-1] == ".ci/run"
    for recipe in RECIPES.glob("*.yml"):
        assert yaml.safe_load(recipe.read_text())["permissions"] == {"contents": "read"}
        for step in steps(recipe.name):
            for script in re.findall(r"\.ci/\w+", step.get("run", "")):
                assert (ROOT / script).stat().st_mode & 0o100, f"{script} cannot be run"
    settings = PROJECT["tool"]["cibuildwheel"]
    assert "cp311-*" in settings["build"]
    assert any("verify" in line for line in settings["test-command"])


def test_the_changelog_has_its_form() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert versions[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", version) for version in versions[1:])
    kinds = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Privacy"]
    for part in re.split(r"^## .*$", text, flags=re.MULTILINE)[1:]:
        named = re.findall(r"^### (.*)$", part, re.MULTILINE)
        assert named == [kind for kind in kinds if kind in named], "sections, each once, in their order"
    assert not re.search(r"^(<{7}|={7}|>{7})", text, re.MULTILINE)


def test_templates_keep_privacy_bugs_out_of_public_issues() -> None:
    bug = (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.md").read_text()
    assert "SECURITY.md" in bug
    assert bug.startswith("---\nname: ")
    assert "Privacy" in (ROOT / ".github" / "PULL_REQUEST_TEMPLATE.md").read_text()


def git(*words: str, cwd: Path) -> None:
    identity = ["-c", "user.name=tests", "-c", "user.email=tests@example.org"]
    subprocess.run(["git", *identity, *words], cwd=cwd, check=True, capture_output=True)


def test_each_version_of_the_docs_is_built_from_its_own_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import _versions

    tree = tmp_path / "tree"
    (tree / "docs").mkdir(parents=True)
    (tree / "src").mkdir()
    git("init", "-q", cwd=tree)
    (tree / "docs" / "conf.py").write_text("html_theme = 'basic'\n")
    (tree / "src" / "keep").write_text("")
    for version in ("v0.9.0", "v0.10.0", "later"):
        (tree / "docs" / "index.rst").write_text(f"Words of {version}\n====================\n")
        git("add", "-A", cwd=tree)
        git("commit", "-qm", version, cwd=tree)
        if version != "later":
            git("tag", version, cwd=tree)
    git("tag", "v1.0.0rc1", cwd=tree)
    assert _versions.releases(tree) == ["v0.10.0", "v0.9.0"]
    _versions.main([str(tmp_path / "site")], tree)
    for folder, words in (("0.9.0", "v0.9.0"), ("0.10.0", "v0.10.0"), ("unreleased", "later")):
        assert f"Words of {words}" in (tmp_path / "site" / folder / "index.html").read_text()
    listed = (tmp_path / "site" / "index.html").read_text()
    assert listed.index("0.10.0") < listed.index("0.9.0") < listed.index("unreleased")
    assert 'href="0.10.0/index.html">0.10.0</a> (the newest release)' in listed
