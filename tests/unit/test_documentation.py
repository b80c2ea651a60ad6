"""The documentation agrees with the code: commands, and everything the reference lists."""

import re
import tomllib
from pathlib import Path

import click
import msgspec
import pytest

from scripts.docs_reference import MARKER, PARTS, commands, fill_in, options_of
from stoker import paths
from stoker.settings import EVENTS, Exemption, Notifications, Settings, SlurmWatch, WebSettings, settings_of
from tests.support import pages
from tests.support.pages import DOCS, REFERENCE, ROOT, blocks, check_usage, names_in_tables, section, stoker_words

SOURCES = sorted((ROOT / "src").rglob("*.py"))
SHELLS = ("console", "sh", "bash")


def in_sources(pattern: str) -> set[str]:
    return {name for path in SOURCES for name in re.findall(pattern, path.read_text())}


@pytest.mark.parametrize("page", [*pages.pages(), ROOT / "README.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_shown_have_verbs_and_options_that_exist(page: Path) -> None:
    for block in blocks(page):
        if block.language not in SHELLS:
            continue
        text = re.sub(r"^\$ ", "", "\n".join(block.lines), flags=re.MULTILINE)
        if block.language == "console":
            text = "\n".join(command.text for command in pages.commands(block))
        for line in text.replace("\\\n", " ").splitlines():
            for arguments in stoker_words(line):
                try:
                    check_usage(arguments)
                except click.UsageError as error:
                    pytest.fail(f"{block.place}: `stoker {' '.join(arguments)}`: {error.format_message()}")


@pytest.mark.parametrize("page", pages.pages("tutorial.md", "how-to"), ids=lambda page: page.stem)
def test_commands_of_a_guide_are_run_or_say_why_not(page: Path) -> None:
    unmarked = [block.place for block in blocks(page) if block.language in ("sh", "bash") and not block.note]
    assert not unmarked, f"write ```console, or <!-- not run: REASON --> before it: {', '.join(unmarked)}"


def test_generated_parts_exist() -> None:
    used = {name for page in pages.pages() for name in MARKER.findall(page.read_text())}
    assert used == set(PARTS)


def test_command_reference_has_every_verb_and_option() -> None:
    text = fill_in((REFERENCE / "commands.md").read_text())
    for name, command in commands():
        assert f" `{name}`\n" in text
        for option in options_of(command):
            assert all(spelled in text for spelled in option.opts), f"{name} {option.opts}"


def test_environment_variables_are_those_the_code_mentions() -> None:
    documented = {name for name in names_in_tables((REFERENCE / "environment.md").read_text()) if "STOKER_" in name}
    of_options = {str(option.envvar) for _, command in commands() for option in options_of(command) if option.envvar}
    assert documented == in_sources(r"\bSTOKER_[A-Z]+(?:_[A-Z]+)*\b") | of_options


def test_settings_are_those_of_the_configuration_file() -> None:
    tables = {"run", "watch", "work", "fill", "fit", "notify", "web", "slurm_watch"}
    plain = set(Settings.__struct_fields__) - tables
    names = {field.name: field.encode_name for field in msgspec.structs.fields(Settings)}
    assert names_in_tables(section("settings.md", "Top-level keys")) == {names[name] for name in plain}
    assert set(Settings.__struct_fields__) == plain | tables
    keys = {field.encode_name for field in msgspec.structs.fields(Notifications)}
    assert names_in_tables(section("settings.md", "`[notify]`")) == keys
    assert names_in_tables(section("settings.md", "`[web]`")) == set(WebSettings.__struct_fields__)
    keys = {field.encode_name for table in (SlurmWatch, Exemption) for field in msgspec.structs.fields(table)}
    assert names_in_tables(section("settings.md", "`[slurm-watch]`")) == keys


def test_notification_events_are_those_that_can_be_sent() -> None:
    page = (DOCS / "how-to" / "notifications.md").read_text()
    _, _, table = page.partition("| event | when |\n")
    assert names_in_tables(table.partition("\n\n")[0]) == set(EVENTS)


@pytest.mark.parametrize("page", pages.pages(), ids=lambda page: str(page.relative_to(DOCS)))
def test_settings_shown_are_valid(page: Path) -> None:
    for block in blocks(page):
        if block.language == "toml":
            settings_of(tomllib.loads("\n".join(block.lines)))


def test_metrics_are_those_of_the_metrics_page() -> None:
    in_code = set(re.findall(r'"(stoker_[a-z_]+)"', (ROOT / "src/stoker/web/metrics.py").read_text()))
    assert {name.removesuffix("_info") for name in names_in_tables((REFERENCE / "metrics.md").read_text())} == in_code


def test_requests_of_the_api_are_those_of_its_description() -> None:
    from tests.support.api_site import new_app

    in_code = {
        f"{method.upper()} {path.removeprefix('/api/v1')}"
        for path, methods in new_app().openapi()["paths"].items()
        for method in methods
    }
    assert names_in_tables(section("http-api.md", "Requests")) == in_code


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert sorted(re.findall(r"[\w/-]+\.md", navigation)) == sorted(
        str(page.relative_to(DOCS)) for page in pages.pages()
    )


def test_answer_to_a_change_has_the_documented_fields() -> None:
    from tests.support.api_site import new_app

    description = new_app().openapi()
    answer = description["paths"]["/api/v1/jobs/{job}/hold"]["post"]["responses"]["200"]["content"]["application/json"]
    schema = description["components"]["schemas"][answer["schema"]["$ref"].rpartition("/")[2]]
    (example,) = re.findall(r"```json\n(.*?)```", section("http-api.md", "Changes"), re.DOTALL)
    assert set(msgspec.json.decode(example)) == set(schema["properties"])


def test_documented_files_are_those_that_stoker_writes() -> None:
    kept = {name.split("/")[0].replace("*", "x") for name in names_in_tables(section("files.md", "State directory"))}
    assert [name for name in kept if not name.startswith("-") and not paths._OWN.fullmatch(name)] == []
    literals = in_sources(r'"([a-z_.]+\.(?:json|md|log|db))"') | {
        "output",
        "output.1",
        "steps.PID",
        "code/",
        "code.tar.z",
    }
    assert [name for name in names_in_tables(section("files.md", "An attempt")) if name not in literals] == []


def test_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    _, _, table = (DOCS / "index.md").read_text().partition("| extra |")
    assert names_in_tables(table) == set(project["optional-dependencies"])


def test_exit_codes_name_verbs_that_exist() -> None:
    verbs = {name.removeprefix("stoker ") for name, _ in commands()}
    named = names_in_tables((REFERENCE / "exit-codes.md").read_text())
    assert {name.partition(" -")[0] for name in named} <= verbs
