"""How near to the largest batch that fits each method comes, and at what cost: `docs/explanation/fit-comparison.md`."""

import statistics
from pathlib import Path

from bench.fit_peers import ACCELERATE_FIRST, WAYS, Outcome
from bench.table import Figure, print_figures
from stoker.fit.search import RUNS, RUNS_FOR_A_POOR_ANSWER
from stoker.units import format_memory
from tests.support.trainers import TRAINERS, Trainer

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "fit-comparison.md"
GOOD = 0.9


def main() -> int:
    outcomes = compared()
    PAGE.write_text(page(outcomes))
    print("\nBatch sizes found\n")
    print("\n".join(_summary(outcomes)))
    ours = {name: found["stoker fit"] for name, found in outcomes.items()}
    fitting = {name: outcome for name, outcome in ours.items() if TRAINERS[name].ends == "size"}
    # What was started again smaller is no answer of the search.
    first = {name: outcome for name, outcome in fitting.items() if not outcome.restarts}
    worst = min(_share(TRAINERS[name], outcome) for name, outcome in first.items())
    return print_figures(
        f"Fitting {len(TRAINERS)} simulated programs",
        [
            Figure("missed of the largest that fits, worst", (1 - worst) * 100, (1 - GOOD) * 100, "%"),
            Figure("real runs that run out of memory", sum(outcome.dies for outcome in ours.values()), 0, ""),
            Figure("runs, most", max(outcome.runs for outcome in ours.values()), RUNS_FOR_A_POOR_ANSWER, ""),
            Figure(
                "runs, most where memory does not bend strongly",
                max(outcome.runs for name, outcome in fitting.items() if not TRAINERS[name].bends_strongly),
                RUNS,
                "",
            ),
        ],
    )


def compared() -> dict[str, dict[str, Outcome]]:
    return {name: {way: find(trainer) for way, find in WAYS.items()} for name, trainer in TRAINERS.items()}


def _share(trainer: Trainer, outcome: Outcome) -> float:
    return (outcome.size or 0) / trainer.true_limit()


def _summary(outcomes: dict[str, dict[str, Outcome]]) -> list[str]:
    heads = ["method", "of the largest: median", "worst", "runs: mean", "most", "out of memory"]
    heads += ["real runs that die", "restarted smaller", "no answer where there is none"]
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    hopeless = [name for name, trainer in TRAINERS.items() if trainer.ends != "size"]
    for way in WAYS:
        fitting = {name: found[way] for name, found in outcomes.items() if TRAINERS[name].ends == "size"}
        shares = [_share(TRAINERS[name], outcome) for name, outcome in fitting.items()]
        runs = [outcome.runs for outcome in fitting.values()]
        lines.append(
            f"| {way} | {statistics.median(shares):.0%} | {min(shares):.0%} "
            f"| {statistics.mean(runs):.1f} | {max(runs)} "
            f"| {sum(outcome.ran_out for outcome in fitting.values())} "
            f"| {sum(outcome.dies for outcome in fitting.values())} of {len(fitting)} "
            f"| {sum(outcome.restarts > 0 for outcome in fitting.values())} "
            f"| {sum(outcomes[name][way].size is None for name in hopeless)} of {len(hopeless)} |"
        )
    return lines


def _table(outcomes: dict[str, dict[str, Outcome]]) -> list[str]:
    lines = [
        f"| program | limit | largest | {' | '.join(WAYS)} |",
        f"|---|---:|---:|{'---|' * len(WAYS)}",
    ]
    for name, found in outcomes.items():
        trainer = TRAINERS[name]
        largest = trainer.true_limit() if trainer.ends == "size" else "none"
        cells = " | ".join(_cell(trainer, outcome) for outcome in found.values())
        lines.append(f"| {name} | {trainer.limit / 2**30:.1f} GiB | {largest} | {cells} |")
    return lines


def _cell(trainer: Trainer, outcome: Outcome) -> str:
    price = f"{outcome.runs}/{outcome.ran_out}"
    if outcome.size is None:
        return f"no answer, {price}"
    share = f" ({_share(trainer, outcome):.0%})" if trainer.ends == "size" else ""
    again = f", restarted {'once' if outcome.restarts == 1 else 'twice'}" if outcome.restarts else ""
    return f"{outcome.size}{share}, {price}{again}{', **dies**' if outcome.dies else ''}"


def page(outcomes: dict[str, dict[str, Outcome]]) -> str:
    return f"""# Batch-size finders compared

`python -m bench fit` writes this page, and a test holds it up to date. Every method gets the same {len(TRAINERS)}
simulated programs (`tests/support/trainers.py`). No GPU is involved: the rules are compared, as documented or read in
the sources, not the frameworks.

{chr(10).join(_summary(outcomes))}

- **largest**: the largest allowed size (a multiple of 8 up to 4096, unless stated otherwise) with which the whole real
  run stays within the margin of 10 %. Methods with another margin can exceed 100 %.
- **runs**: starts of the program until there is an answer, including a verification. `power` and `binsearch` try within
  one process, where a run is cheaper.
- **out of memory**: runs that exhausted memory.
- **dies**: the real run with that size exhausts memory, perhaps hours later.
- **restarted smaller**: a queued job whose real run exhausts memory is restarted with four fifths of the size, at most
  twice, and the next fit of that command starts there.
- **no answer where there is none**: for a program of which not even a batch of one fits, and one that never reaches a
  step.

The methods:

- **stoker fit**: memory = fixed + slope × size from two runs, then a verification; where the line bends, the interval
  is halved (`src/stoker/fit/search.py`).
- **in proportion**: one run at the default size, memory sampled every ten seconds, then nine tenths of the card in
  proportion. It treats weights and context as if they grew with the batch.
- **power**, **binsearch**: the two modes of Lightning's finder. Both double from 2 until memory runs out; the second
  then halves the interval and takes off 5 %. Three steps each.
- **shrinking**: accelerate's finder. From {ACCELERATE_FIRST}, nine tenths whenever memory runs out. Its tries are the
  training itself, and it never finds more than it began with.

## Each program

Size (share of the largest), runs/out of memory.

{chr(10).join(_table(outcomes))}

## The programs

On a card of 24 GiB unless stated otherwise.

{chr(10).join(f"- **{name}**: {_habits(trainer)}" for name, trainer in TRAINERS.items())}

## What the simulation leaves out

- Another user who takes more than the margin after the size was found.
- What a failed try leaves behind in its process, which affects methods that try within one process.
"""


def _habits(trainer: Trainer) -> str:
    per_example = format_memory(int(trainer.slope))
    said = [f"{format_memory(trainer.fixed)} and {per_example} for each example"]
    said += [f"{format_memory(int(trainer.bend * 100**2))} on top at 100, four times that at 200"] * (trainer.bend > 0)
    said += [f"{format_memory(trainer.optimizer)} more from step 2 on"] * (trainer.optimizer > 0)
    said += [f"in blocks of {format_memory(trainer.block)}"] * (trainer.block >= 2**20)
    if trainer.validation_at is not None:
        said.append(f"validation at step {trainer.validation_at} with {trainer.validation:g} times what a step takes")
    said += [f"{format_memory(trainer.creep)} more by the end"] * (trainer.creep > 0)
    said += [f"±{trainer.jitter:.0%} from run to run"] * (trainer.jitter > 0)
    said += [f"{trainer.unseen:.0%} is held too shortly to be seen"] * (trainer.unseen > 0)
    if trainer.own_size is not None:
        said.append(f"always takes {trainer.own_size}")
    if len(trainer.neighbour) > 1:
        said.append(f"another user holds {', '.join(map(format_memory, trainer.neighbour))} in turn")
    if trainer.examples < 2**31:
        said.append(f"{trainer.examples} examples")
    said += ["reaches no step"] * (not trainer.reaches_a_step)
    said += [f"`--base {trainer.search_options.base}`"] * (trainer.search_options.base != 8)
    said += [f"`--multiple {trainer.search_options.multiple}`"] * (trainer.search_options.multiple != 8)
    said += [f"`--max {trainer.search_options.most}`"] * (trainer.search_options.most != 4096)
    said += [f"`--per-gpu {trainer.search_options.per_gpu}`"] * (trainer.search_options.per_gpu != 1)
    if trainer.total != 24 * 2**30:
        said.append(f"{format_memory(trainer.total)} in all")
    return "; ".join(said)
