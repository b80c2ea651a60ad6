"""`--fit-with` of other verbs: the options of `stoker fit` in one text, understood by `stoker fit` itself."""

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from stoker.errors import BadInputError

if TYPE_CHECKING:
    from stoker.fit.model import FitSpec
    from stoker.queue.commands import Command


def fit_of(
    text: str, retries_oom: int, commands: "Sequence[Command]", batch_size: int | None, gpus: int
) -> dict[str, Any]:
    """What is kept with a job. Refuses what could not be fitted, before it waits for a GPU all night."""
    from stoker.fit.model import check_fittable, fit_fields

    check_fittable(batch_size, gpus)
    return fit_fields(fit_spec_of(text, retries_oom), commands)


def fit_spec_of(text: str, retries_oom: int) -> "FitSpec":
    """What `--fit-with` asks for. Its mistakes are told as those of `stoker fit`."""
    from stoker.cli.verbs.fit import fit_command
    from stoker.fit.model import FitSpec, Overrides, ProbeOptions, SearchOptions

    try:
        words = shlex.split(text)
    except ValueError as error:
        raise BadInputError(f"--fit-with {text!r} cannot be split into words: {str(error).lower()}") from None
    try:
        options = fit_command.make_context("fit", [*words, "--", "command"]).params
    except click.ClickException as error:
        raise BadInputError(f"--fit-with: {error.format_message()} (`stoker fit --help` shows what there is)") from None
    if options["words"] != ("command",):
        raise BadInputError(f"--fit-with takes options of `stoker fit`, and {options['words'][0]!r} is none")
    spec = FitSpec(
        search_options=SearchOptions(**{name: options[name] for name in SearchOptions.__struct_fields__}),
        overrides=Overrides(**{name: options[name] for name in Overrides.__struct_fields__}),
        limits=ProbeOptions(seconds=options["probe_time"], flat_for=options["flat_for"], until=options["probe_until"]),
        rate=options["rate"],
        reuse=None if options["refit"] else options["reuse"],
        retries_oom=retries_oom,
    )
    spec.search_options.check()
    spec.limits.pattern()
    return spec
