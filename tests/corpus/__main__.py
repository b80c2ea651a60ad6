"""`python -m tests.corpus DIRECTORY` writes every trace as a recording, and what is true of them to `corpus.json`."""

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from stoker.gpus.recording import RecordingWriter
from tests.corpus import HALVES, SEED, Trace, corpus


def write_corpus(directory: Path, traces: tuple[Trace, ...]) -> Path:
    """Writes the recordings and the labels, and returns the file of the labels."""
    directory.mkdir(parents=True, exist_ok=True)
    for trace in traces:
        path = directory / file_name(trace)
        path.unlink(missing_ok=True)
        writer = RecordingWriter(path)
        for look in trace.looks():
            writer.append(look)
        writer.close()
    labels = directory / "corpus.json"
    labels.write_bytes(msgspec.json.format(msgspec.json.encode([facts(trace) for trace in traces])))
    return labels


def file_name(trace: Trace) -> str:
    return trace.id.replace("/", "-") + ".readings"


def facts(trace: Trace) -> dict[str, Any]:
    """What is true of a trace. Times are those of its looks."""
    return {
        "id": trace.id,
        "file": file_name(trace),
        "class": trace.of.name,
        "words": trace.of.words,
        "source": trace.of.source,
        "label": trace.label,
        "half": trace.half,
        "begun": trace.begun,
        "from_when": trace.from_when,
        "ended": trace.ended,
        "every": trace.setting.every,
        "board": trace.board.name,
        "gpus": trace.setting.gpus,
        "user": trace.user,
        "pids": sorted(trace.pids),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.corpus", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--half", choices=HALVES, help="only this half")
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    traces = tuple(trace for trace in corpus(options.seed) if options.half in {None, trace.half})
    labels = write_corpus(options.directory, traces)
    sys.stdout.write(f"wrote {len(traces)} recordings and {labels}\n")


if __name__ == "__main__":
    main()
