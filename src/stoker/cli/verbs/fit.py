"""`stoker fit`: find the largest batch size that fits, by short runs of the command itself."""

import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from stoker.cli.options.common import DURATION, FRACTION, open_prober, option_defaults, source_options
from stoker.cli.output import json_option, note, print_json
from stoker.errors import BadInputError, StokerError
from stoker.settings import load_settings

if TYPE_CHECKING:
    from stoker.fit.cache import CachedFit, Key
    from stoker.fit.fitter import FitRequest, Fitter
    from stoker.fit.model import Fitted
    from stoker.gpus.prober import Prober
    from stoker.queue.commands import Command
    from stoker.runs.processes.signals import SignalStream

_ANY_AGE: Final = "36500d"
# Options of a single call, which a preset cannot contain.
_NOT_IN_PRESETS: Final = ("preset", "json", "gpu", "source", "deadline", "refit")


def _use_preset(context: click.Context, _parameter: click.Parameter, name: str | None) -> str | None:
    """Makes the preset's values the defaults; options on the command line override them."""
    from stoker.fit.model import find_preset

    if name is None:
        return None
    preset = find_preset(name, load_settings().fit)
    context.default_map = option_defaults(f"fit.{name}", preset, context.command.params, excluded=_NOT_IN_PRESETS)
    return name


@click.command(
    "fit",
    context_settings={"allow_interspersed_args": False},
    epilog="One word is text for the shell, several words are run without a shell. The size replaces {batch_size} in "
    "the command, or is set by --batch-env or --batch-arg. Only the size is printed; progress goes to standard "
    "error.",
)
@click.option("--batch-arg", "argument", metavar="TEXT", help="Append this with the size in {} [--batch_size={}].")
@click.option("--batch-env", "variable", metavar="NAME", help="Put the size into this environment variable instead.")
@click.option(
    "--probe-args",
    "probe_arguments",
    default="",
    metavar="TEXT",
    help="Append this to probes, for a short run without logging.",
)
@click.option("--probe-time", type=DURATION, default="120s", metavar="DURATION", help="Time limit of a probe [120s].")
@click.option("--probe-until", metavar="REGEX", help="End a probe when it prints this.")
@click.option(
    "--flat-for", type=DURATION, default="20s", metavar="DURATION",
    help="… or when its memory is constant for this long or 5 printed steps [20s].",
)  # fmt: skip
@click.option("--base", type=int, default=8, metavar="N", help="Try this size first [8].")
@click.option("--multiple", type=int, default=8, metavar="N", help="Return a multiple of this [8].")
@click.option("--max", "most", type=int, default=4096, metavar="N", help="Return at most this [4096].")
@click.option(
    "--margin", type=FRACTION, default="10%", metavar="PERCENT", help="Leave this share of the memory free [10%]."
)
@click.option("--per-gpu", type=int, default=1, metavar="K", help="This number of such runs will share the GPU [1].")
@click.option(
    "--effective", type=int, metavar="N", help="Effective batch size; {accumulate} is the number of steps for it."
)
@click.option(
    "--prefer", type=click.Choice(["largest", "fastest"]), default="largest", help="Which size to choose [largest]."
)
@click.option("--rate", metavar="REGEX", help="Matches the throughput in the output (first group).")
@click.option(
    "--preset", metavar="NAME", is_eager=True, callback=_use_preset, expose_value=False,
    help="A preset: nanogpt, or [fit.NAME] of stoker.toml.",
)  # fmt: skip
@click.option(
    "--reuse", type=DURATION, is_flag=False, flag_value=_ANY_AGE, metavar="[DURATION]",
    help="Use an earlier result if it is not older.",
)  # fmt: skip
@click.option("--refit", is_flag=True, help="Ignore earlier results.")
@click.option("--gpu", metavar="GPU", help="The GPU, by number or uuid [the first visible one].")
@source_options
@json_option("Print the model, the probes and the prediction as JSON.")
@click.argument("words", metavar="COMMAND...", nargs=-1, type=click.UNPROCESSED)
def fit_command(
    words: tuple[str, ...],
    reuse: float | None,
    refit: bool,
    gpu: str | None,
    source: str | None,
    deadline: float | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Find the largest batch size with which COMMAND fits on the GPU."""
    from stoker.fit.fitter import FitRequest, Fitter, probe_outputs
    from stoker.gpus.spawn import forked
    from stoker.paths import state_home
    from stoker.runs.processes.signals import SignalStream

    if not words:
        raise BadInputError("there is no command to fit: write it after --, as in `stoker fit -- python train.py`")
    typed: Command = words[0] if len(words) == 1 else words
    with (
        SignalStream((signal.SIGINT, signal.SIGTERM, signal.SIGHUP)) as signals,
        open_prober(source, deadline, start=forked) as prober,
        probe_outputs(state_home() / "probes", note) as outputs,
    ):
        environment = {
            name: value for name, value in os.environ.items() if name not in ("STOKER_RUN", "STOKER_RUN_DIR")
        }
        request = FitRequest(command=typed, environment=environment, outputs=outputs, **search_fields(options))
        request.check()
        if gpu is not None:
            request = _on(gpu, request, prober)
        fitter = Fitter(request, prober, note, lambda: _heed(signals))
        key = _key(request, fitter)
        cached = None if reuse is None or refit else _recall(key, reuse, fitter)
        if cached is None and not refit:
            fitter = Fitter(_learned(request, key), prober, note, lambda: _heed(signals))
        fitted = cached.fitted if cached is not None else _found(fitter, key)
    _print(fitted, cached, key, fitter, as_json)
    return 0


def search_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the search as fields of a `FitRequest` or `FitSpec`."""
    from stoker.fit.model import Overrides, ProbeOptions, SearchOptions

    return {
        "search_options": SearchOptions(**{name: options[name] for name in SearchOptions.__struct_fields__}),
        "overrides": Overrides(**{name: options[name] for name in Overrides.__struct_fields__}),
        "limits": ProbeOptions(
            seconds=options["probe_time"], flat_for=options["flat_for"], until=options["probe_until"]
        ),
        "rate": options["rate"],
    }


def _on(typed: str, request: "FitRequest", prober: "Prober") -> "FitRequest":
    """The request for this GPU only."""
    from msgspec.structs import replace

    from stoker.gpus.visible import select_gpus, set_visible_gpus

    look = prober.look()
    if look.problem is not None:
        raise StokerError(f"the GPUs cannot be read, so nothing can be fitted: {look.problem.reason}")
    chosen = select_gpus(look.gpus, typed)
    environment = dict(request.environment)
    environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    set_visible_gpus(environment, chosen, look.gpus)
    return replace(request, environment=environment, gpus=tuple(one.uuid for one in chosen))


def _key(request: "FitRequest", fitter: "Fitter") -> "Key":
    from stoker.fit.cache import key_of

    directory = request.directory or str(Path.cwd())
    return key_of(request.command, directory, fitter.gpus[0], request.search_options, request.overrides)


def _learned(request: "FitRequest", key: "Key") -> "FitRequest":
    """The request without sizes that ran out of memory in a real run."""
    from msgspec.structs import replace

    from stoker.fit.cache import FitCache, learned
    from stoker.paths import state_home

    search_options = learned(FitCache(state_home()).find(key), request.search_options)
    if search_options != request.search_options:
        note(f"a batch larger than {search_options.most} ran out of memory in an earlier run: --refit tries it again")
    return replace(request, search_options=search_options)


def _recall(key: "Key", oldest: float, fitter: "Fitter") -> "CachedFit | None":
    """An earlier result, unless it is too old or does not fit the currently free memory."""
    from stoker.fit.cache import FitCache
    from stoker.paths import state_home
    from stoker.units import format_duration, format_memory

    cached = FitCache(state_home()).find(key)
    if cached is None:
        note("nothing is cached for this command on such a GPU: fitting it now")
        return None
    age = format_duration(max(0.0, time.time() - cached.at))
    if time.time() - cached.at > oldest:
        note(f"what is cached is {age} old, which is too old: fitting it again")
        return None
    limit = fitter.limit()
    if cached.fitted.predicted > limit:
        needed = format_memory(cached.fitted.predicted)
        note(f"what is cached needs {needed}, and only {format_memory(limit)} may be used now: fitting it again")
        return None
    note(f"found {age} ago, and not tried again: --refit does")
    return cached


def _found(fitter: "Fitter", key: "Key") -> "Fitted":
    from stoker.fit.cache import FitCache
    from stoker.paths import state_home
    from stoker.units import format_memory, format_percent

    first = fitter.gpus[0]
    free = format_memory(fitter.capacity().free)
    note(f"GPU {first.index} ({key.gpu}) has {free} free; {format_percent(key.search_options.margin)} of it stays free")
    fitted = fitter.fit()
    FitCache(state_home()).keep(key, fitted)
    return fitted


def _print(fitted: "Fitted", cached: "CachedFit | None", key: "Key", fitter: "Fitter", as_json: bool) -> None:
    from stoker.gpus.model import known
    from stoker.units import format_memory

    if fitted.note:
        note(f"note: {fitted.note}")
    if as_json:
        gpus = [
            {
                "index": gpu.index,
                "uuid": gpu.uuid,
                "name": gpu.name if known(gpu.name) else None,
                "memory": gpu.memory if known(gpu.memory) else None,
            }
            for gpu in fitter.gpus
        ]
        print_json(
            {
                "size": fitted.size,
                "accumulate": fitted.accumulate,
                "model": {"fixed": round(fitted.fixed), "slope": round(fitted.slope)},
                "predicted": fitted.predicted,
                "limit": fitted.limit,
                "margin": key.search_options.margin,
                "gpus": gpus,
                "probes": fitted.observations,
                "note": fitted.note,
                "reused": None if cached is None else {"at": cached.at, "age": round(time.time() - cached.at, 3)},
            }
        )
        return
    predicted, limit = format_memory(fitted.predicted), format_memory(fitted.limit)
    note(f"memory = {format_memory(round(fitted.fixed))} + {format_memory(round(fitted.slope))} × batch size")
    steps = "" if fitted.accumulate is None else f", accumulated over {fitted.accumulate} steps"
    note(f"a batch of {fitted.size} takes {predicted} of the {limit} that it may take{steps}")
    sys.stdout.write(f"{fitted.size}\n")


def _heed(signals: "SignalStream") -> None:
    for received in signals.read():
        name = signal.Signals(received.signal).name
        raise StokerError(f"stopped by {name}; nothing of the probe is left", exit_code=128 + received.signal)
