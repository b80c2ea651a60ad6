"""`stoker fit` as typed."""

import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import numpy_trainer, sim_trainer
from tests.support.command import Finished, stoker, stoker_command
from tests.support.scripts import REPOSITORY
from tests.support.waiting import wait_for

GIB = 2**30
MIB = 2**20
# It trains until the probe has seen enough: a short one could end before it is sampled.
TRAINER = (sys.executable, sim_trainer.__file__, "--steps", "100000")
# By then it holds all that it takes, and the probe is over with the next look.
SEEN = ("--probe-until", "step 1:")
# The first size is the largest, so that one probe is all.
ONCE = (*SEEN, "--max", "8")
# Resident memory stands in for the card's: the program says that it is on the card.
RESIDENT = ("env", "STOKER_RSS_GPU=0", sys.executable)


@pytest.fixture(autouse=True)
def _one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_GPUS", "sim:1x24GiB")


@pytest.fixture
def resident_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every interpreter that is started here has the source `rss`."""
    (tmp_path / "plugin").mkdir()
    (tmp_path / "plugin/sitecustomize.py").write_text("import tests.support.rss_source")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/plugin:{REPOSITORY}")


def said(file: Path) -> list[str]:
    """Arguments of the probes, without those common to all tests."""
    return [line.partition(f"--said {file} ")[2] for line in file.read_text().splitlines()]


def test_size_is_printed_alone_and_the_search_on_standard_error() -> None:
    done = stoker("fit", *SEEN, "--", *TRAINER)
    assert (done.code, done.out) == (0, "200\n")
    lines = done.err.splitlines()
    assert lines[0] == "stoker: GPU 0 (Simulated 24 GiB) has 24 GiB free; 10% of it stays free"
    assert "stoker: memory = 2.0 GiB + 100 MiB × batch size" in lines
    assert lines[-1] == "stoker: a batch of 200 takes 22 GiB of the 22 GiB that it may take"


def test_json_has_model_probes_margin_and_prediction() -> None:
    answer = stoker("fit", *SEEN, "--json", "--margin", "20%", "--per-gpu", "2", "--", *TRAINER).json()
    assert (answer["size"], answer["margin"], answer["reused"]) == (72, 0.2, None)
    assert answer["model"] == {"fixed": 2 * GIB, "slope": 100 * MIB}
    assert (answer["predicted"], answer["limit"]) == ((2048 + 72 * 100) * MIB, int(24 * GIB * 0.8 / 2))
    first, *_others, last = answer["probes"]
    assert (first["size"], first["peak"], first["outcome"]) == (8, (2048 + 8 * 100) * MIB, "fits")
    assert (last["size"], last["verification"]) == (72, True)
    assert [gpu["name"] for gpu in answer["gpus"]] == ["Simulated 24 GiB"]


class Way(NamedTuple):
    """How the size is passed, and the arguments of a probe after --said FILE."""

    options: tuple[str, ...]
    more: tuple[str, ...]
    result: str


@pytest.mark.parametrize(
    "way",
    [
        Way((), ("--lr=1",), "--lr=1 --batch_size=8"),
        Way(("--batch-arg", "--batch_size {} --quick"), (), "--batch_size 8 --quick"),
        Way(("--batch-env", "BATCH"), ("--lr=1",), "--lr=1"),
        Way((), ("--batch_size={batch_size}", "--text={{batch_size}}"), "--batch_size=8 --text={batch_size}"),
        Way(
            ("--probe-args", "--max_tokens=1000000 --wandb_log=False"),
            ("--max_tokens=9",),
            "--max_tokens=9 --batch_size=8 --max_tokens=1000000 --wandb_log=False",
        ),
        Way(("--effective", "20"), ("--accumulate={accumulate}",), "--accumulate=3 --batch_size=8"),
    ],
    ids=["appended", "own argument", "variable", "placeholder", "probe arguments", "accumulation"],
)
@pytest.mark.parametrize("shape", ["words", "shell"])
def test_size_is_passed_as_configured(way: Way, shape: str, tmp_path: Path) -> None:
    file = tmp_path / "said"
    words = (*TRAINER, "--said", str(file), *way.more)
    typed = words if shape == "words" else (shlex.join(words),)
    answer = stoker("fit", "--json", *ONCE, *way.options, "--", *typed).json()
    assert said(file) == [way.result]
    assert answer["probes"][0]["peak"] == (2048 + 8 * 100) * MIB


def test_effective_batch_is_split_into_accumulation_steps() -> None:
    answer = stoker("fit", *SEEN, "--json", "--effective", "512", "--", *TRAINER, "--grad={accumulate}").json()
    assert answer["size"] * answer["accumulate"] == 512
    assert answer["size"] <= 200


def test_options_override_the_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "stoker.toml"
    config.write_text('[fit.mine]\nmax = 8\nbatch-env = "BATCH"\nmargin = "20%"\nprobe_args = "--quick"\n')
    monkeypatch.setenv("STOKER_CONFIG", str(config))
    file = tmp_path / "said"
    done = stoker("fit", *SEEN, "--preset", "mine", "--margin", "30%", "--json", "--", *TRAINER, "--said", str(file))
    assert (done.json()["size"], done.json()["margin"]) == (8, 0.3)
    assert said(file) == ["--quick"]


def test_nanogpt_preset_exists(tmp_path: Path) -> None:
    file = tmp_path / "said"
    assert stoker("fit", "--preset", "nanogpt", *ONCE, "--", *TRAINER, "--said", str(file)).out == "8\n"
    assert said(file) == ["--batch_size=8 --max_iters=30 --log_interval=1 --eval_iters=2 --wandb_log=False"]


def test_cached_size_is_reused_on_request_with_its_age(tmp_path: Path) -> None:
    file = tmp_path / "said"

    def fit(*options: str, seed: int = 1, slope: int = 100) -> Finished:
        words = (*TRAINER, "--said", str(file), "--seed", str(seed), f"--slope={slope}")
        return stoker("fit", *ONCE, *options, "--", *words)

    first = fit("--reuse")
    assert "nothing is cached for this command on such a GPU" in first.err
    again = fit("--reuse", "1h", seed=2)
    assert (again.out, len(said(file))) == ("8\n", 1)
    assert re.search(r"found [\d.]+s ago, and not tried again: --refit does", again.err)
    assert len(said(file)) == 1
    for options in (("--reuse", "--refit"), (), ("--reuse", "1ms"), ("--reuse", "--margin=20%")):
        assert fit(*options).out == "8\n"
    assert len(said(file)) == 5
    # Another slope is another training.
    fit("--reuse", slope=110)
    assert len(said(file)) == 6


def test_cached_size_is_not_reused_when_it_does_not_fit() -> None:
    assert stoker("fit", *SEEN, "--", *TRAINER).out == "200\n"
    with subprocess.Popen(["stoker", "sim", "load", "--memory", "8GiB"], stdout=subprocess.PIPE) as neighbour:
        assert neighbour.stdout is not None
        neighbour.stdout.readline()
        done = stoker("fit", *SEEN, "--reuse", "--", *TRAINER)
        neighbour.kill()
    assert done.out == "120\n"
    assert "what is cached needs 22 GiB, and only 14 GiB may be used now" in done.err


def test_gpu_option_selects_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_GPUS", "sim:2x24GiB")
    answer = stoker("fit", "--gpu", "1", *ONCE, "--json", "--", *TRAINER).json()
    assert [gpu["index"] for gpu in answer["gpus"]] == [1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_no_process(number: signal.Signals, tmp_path: Path) -> None:
    file = tmp_path / "left"
    words = [stoker_command(), "fit", "--", *TRAINER, "--silent", "--leave", str(file)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as fit:
        wait_for(lambda: file.exists() and file.read_text())
        fit.send_signal(number)
        out, err = fit.communicate(timeout=60)
    assert (fit.returncode, out) == (128 + number, "")
    assert err.splitlines()[-1] == f"stoker: stopped by {number.name}; nothing of the probe is left"
    assert not Path(f"/proc/{file.read_text()}").exists()
    assert list((tmp_path / "stoker-home" / "probes").iterdir()) == []


class Trouble(NamedTuple):
    """What goes wrong, how it ends, and what is said."""

    command: tuple[str, ...]
    code: int
    says: str
    options: tuple[str, ...] = ()
    out: str = ""
    fault: tuple[str, ...] = ()


TROUBLES = {
    "the base runs out of memory, a smaller one does not": Trouble(
        (*TRAINER, "--slope", "4000"), 0, "batch size 8: out of memory after", out="4\n"
    ),
    "nothing fits": Trouble((*TRAINER, "--fixed", "25000"), 1, "nothing fits: a batch of one ran out of memory"),
    "nothing fits under the margin": Trouble((*TRAINER, "--fixed", "23000"), 1, "it may take 22 GiB"),
    "there is no such command": Trouble(("no-such-command", "-x"), 127, "cannot run 'no-such-command'"),
    "the shell knows no such command": Trouble(("no-such-command",), 1, "failed with code 127 after"),
    "the directory of the script is wrong": Trouble((sys.executable, "/no/train.py"), 1, "No such file or directory"),
    "the probe crashes": Trouble((*TRAINER, "--crash"), 1, "    KeyError: 'no such dataset: shakespeare'"),
    "the flag is ignored": Trouble((*TRAINER, "--slope", "0"), 0, "does not depend on the batch size", out="4096\n"),
    "it never reaches the GPU": Trouble(("sleep 60;:",), 1, "was never seen to use GPU 0", ("--probe-time", "1s")),
    "it ends before the GPU": Trouble(("echo bye;:",), 1, "was never seen to use GPU 0"),
    "the preset is unknown": Trouble(TRAINER, 2, "there is no preset 'none': write [fit.none]", ("--preset", "none")),
    "the regex is wrong": Trouble(TRAINER, 2, "--probe-until '(' is not a regular expression", ("--probe-until", "(")),
    "the rate is wrong": Trouble(TRAINER, 2, "--rate '[' is not a regular expression", ("--rate", "[")),
    "the driver hangs": Trouble(TRAINER, 1, "the GPUs cannot be read", ("--deadline", "0.5s"), fault=("hang",)),
    "the memory cannot be read": Trouble(
        TRAINER, 1, "the memory of GPU 0 cannot be read", fault=("unsupported", "memory")
    ),
    "the GPU is lost": Trouble(TRAINER, 1, "GPU is lost", fault=("lost",)),
}  # fmt: skip


@pytest.mark.parametrize("trouble", TROUBLES.values(), ids=TROUBLES.keys())
def test_failing_trainer_never_yields_a_wrong_size(trouble: Trouble) -> None:
    if trouble.fault:
        stoker("sim", "fault", *trouble.fault)
    words = [stoker_command(), "fit", *SEEN, *trouble.options, "--", *trouble.command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (trouble.code, trouble.out), done.stderr
    assert trouble.says in done.stderr
    assert "internal error" not in done.stderr


def test_complete_output_of_a_failed_probe_is_kept() -> None:
    words = [stoker_command(), "fit", "--", *TRAINER, "--crash"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    (directory,) = re.findall(r"the whole output of the probes is in (\S+)", done.stderr)
    assert "Traceback" in (Path(directory) / "probe-8.out").read_text()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "there is no command to fit"),
        (("--batch-arg", "--size=8", "--", "x"), "has no {} for the size"),
        (("--batch-env", "A B", "--", "x"), "'A B' is not the name of a variable"),
        (("--batch-env", "A", "--batch-arg", "{}", "--", "x"), "the size would go in twice"),
        (("--batch-env", "A", "--", "x {batch_size}"), "the size would go in twice"),
        (("--probe-args", "'", "--", "x"), "cannot be split into words"),
        (("--", "x {accumulate}"), "{accumulate} needs --effective"),
        (("--base", "0", "--", "x"), "--base 0 is out of range"),
        (("--base", "16", "--max", "8", "--", "x"), "--base 16 is above --max 8"),
        (("--margin", "110%", "--", "x"), "out of range"),
        (("--per-gpu", "0", "--", "x"), "--per-gpu must be one or more"),
        (("--probe-time", "0s", "--", "x"), "must be greater than zero"),
        (("--reuse", "soon", "--", "x"), "'soon' is not a duration"),
        (("--gpu", "7", "--", "x"), "there is no GPU 7 here"),
        (("--prefer", "best", "--", "x"), "'best' is not one of"),
    ],
)
def test_invalid_input_is_refused(arguments: tuple[str, ...], sentence: str) -> None:
    refused = stoker("fit", *arguments)
    assert (refused.code, refused.out) == (2, "")
    assert re.fullmatch(r"stoker: [^\n]+\n", refused.err)
    assert sentence in refused.err


def test_invalid_preset_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "stoker.toml"
    config.write_text("[fit.mine]\nbatch_arguments = 8\n")
    monkeypatch.setenv("STOKER_CONFIG", str(config))
    refused = stoker("fit", "--preset", "mine", "--", "x")
    assert refused.code == 2
    assert "stoker.toml: [fit.mine] has no key 'batch_arguments': did you mean 'batch-arg" in refused.err


def fitted_and_run(memory: str, program: str, probe: str, real: str) -> tuple[int, int]:
    """What was predicted for the size that was found, and what the program then took with it."""
    options = ("--source", f"rss:{memory}", "--probe-args", probe, "--json")
    answer = stoker("fit", *options, "--", *RESIDENT, program, timeout=200).json()
    words = [sys.executable, program, f"--batch_size={answer['size']}", real]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=True, env=os.environ)
    assert len(answer["probes"]) <= 4
    (took,) = re.findall(r"^peak (\d+)$", done.stdout, re.MULTILINE)
    assert answer["predicted"] <= answer["limit"]
    return answer["predicted"], int(took)


@pytest.mark.usefixtures("resident_memory")
def test_memory_of_a_real_program_is_predicted_within_ten_percent() -> None:
    predicted, took = fitted_and_run("400MiB", numpy_trainer.__file__, "--max_iters=100000", "--max_iters=5")
    assert took == pytest.approx(predicted, rel=0.1)
    # And the answer makes use of what there is.
    assert took > 0.8 * 400 * MIB * 0.9


NANOGPT = '''
    """A small GPT on random text, with AdamW. Says at its end how much memory it took."""

    import argparse
    import resource

    import torch
    from torch import nn

    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--max_iters", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    width, length, words = 128, 64, 256
    embed = nn.Embedding(words, width)
    block = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
    model = nn.Sequential(embed, nn.TransformerEncoder(block, 4), nn.Linear(width, words))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(options.max_iters):
        text = torch.randint(words, (options.batch_size, length + 1))
        loss = nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"iter {step}: loss {loss.item():.4f}", flush=True)
    print(f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}", flush=True)
'''


@pytest.mark.usefixtures("resident_memory")
@pytest.mark.timeout(400)  # it takes PyTorch seconds to be imported, each time
def test_memory_of_a_small_gpt_is_predicted_within_ten_percent(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    program = tmp_path / "train.py"
    program.write_text(textwrap.dedent(NANOGPT))
    predicted, took = fitted_and_run("1200MiB", str(program), "--max_iters=100000", "--max_iters=5")
    assert took == pytest.approx(predicted, rel=0.1)
