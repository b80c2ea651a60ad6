"""The files that GitHub and pre-commit read are valid, and name things that exist."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.scripts import REPOSITORY

WORKFLOWS = sorted((REPOSITORY / ".github/workflows").glob("*.yml"))
TEMPLATES = sorted((REPOSITORY / ".github/ISSUE_TEMPLATE").glob("*.yml"))
# YAML 1.1 reads the key `on` as true.
ON = True


def named(path: Path) -> str:
    return path.name


def load(path: Path) -> dict[Any, Any]:
    found = yaml.safe_load(path.read_text())
    assert isinstance(found, dict)
    return found


def test_workflows_and_templates_exist() -> None:
    assert {path.name for path in WORKFLOWS} == {"test.yml", "release.yml"}
    assert TEMPLATES


@pytest.mark.parametrize("path", WORKFLOWS, ids=named)
def test_workflow_has_a_trigger_few_permissions_and_time_limits(path: Path) -> None:
    workflow = load(path)
    assert workflow[ON]
    assert workflow["permissions"] == {"contents": "read"}
    assert "group" in workflow["concurrency"]
    for name, job in workflow["jobs"].items():
        assert "uses" in job or ("runs-on" in job and "timeout-minutes" in job), name
        assert set(job.get("needs", "").split()) <= workflow["jobs"].keys()
        for step in job.get("steps", []):
            assert ("uses" in step) != ("run" in step)
            assert "uses" not in step or re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=named)
def test_workflow_calls_targets_of_the_makefile(path: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    called = set(re.findall(r"run: make ([a-z]+)", path.read_text()))
    assert called
    assert called <= targets


def test_matrix_has_every_supported_python_and_postgresql() -> None:
    matrix = load(REPOSITORY / ".github/workflows/test.yml")["jobs"]["test"]["strategy"]["matrix"]
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    classified = [found[1] for line in project["classifiers"] if (found := re.search(r"Python :: (3\.\d+)$", line))]
    assert matrix["python"] == classified
    assert project["requires-python"] == f">={classified[0]}"
    assert matrix["postgres"] == ["15", "16", "17"]


@pytest.mark.parametrize("path", TEMPLATES, ids=named)
def test_issue_template_is_complete(path: Path) -> None:
    template = load(path)
    if path.name == "config.yml":
        assert template["blank_issues_enabled"] in {True, False}
        return
    assert template["name"]
    assert template["description"]
    assert {field["type"] for field in template["body"]} <= {"markdown", "textarea", "input", "dropdown", "checkboxes"}
    identifiers = [field["id"] for field in template["body"] if "id" in field]
    assert len(identifiers) == len(set(identifiers))


def test_pre_commit_runs_the_locked_tools() -> None:
    (local,) = load(REPOSITORY / ".pre-commit-config.yaml")["repos"]
    assert local["repo"] == "local"
    assert {hook["language"] for hook in local["hooks"]} == {"system"}
    assert all(hook["entry"].startswith(".venv/bin/") for hook in local["hooks"])


def test_dependabot_is_valid() -> None:
    found = load(REPOSITORY / ".github/dependabot.yml")
    assert found["version"] == 2
    assert all({"package-ecosystem", "directory", "schedule"} <= update.keys() for update in found["updates"])
