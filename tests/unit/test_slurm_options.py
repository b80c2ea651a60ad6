"""What a job may ask of Slurm, and which GPUs a model names."""

import pytest

from stoker.errors import BadInputError
from stoker.gpus.model import is_model
from stoker.queue.slurm_options import check_further, check_slurm, read_slurm


def test_empty_entries_are_left_out() -> None:
    assert read_slurm({"partition": " gpu ", "account": "", "qos": None, "sbatch": []}) == {"partition": "gpu"}


def test_further_options_may_be_one_text() -> None:
    assert read_slurm({"sbatch": "--nice=1 --begin='now + 1 hour'"}) == {"sbatch": ["--nice=1", "--begin=now + 1 hour"]}
    with pytest.raises(BadInputError, match="cannot be split into options: no closing quotation"):
        read_slurm({"sbatch": "--begin='now"})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"partition": "gpu,spare", "account": "lab", "qos": "high", "constraint": "[a&b]", "reservation": "night"},
        {"sbatch": ["--nice=100", "-xnode3", "--exclusive", "--export-file=env", "--gres=lscratch:100", "-H"]},
    ],
)
def test_valid_options_are_taken(options: dict[str, object]) -> None:
    check_slurm(read_slurm(options))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"partitoin": "gpu"}, "Slurm's options have no 'partitoin': did you mean 'partition'?"),
        ({"nonsense": 1}, "use partition, account, qos, constraint, reservation, sbatch"),
        ({"partition": 3}, "partition: '3' is not text"),
        ({"partition": "a\nb"}, "partition: 'a\\nb' is not one line of at most 200 letters"),
        ({"sbatch": 3}, "sbatch: '3' is not a list of options"),
        ({"sbatch": [3]}, "sbatch: '3' is not text"),
        ({"sbatch": ["--nice=1", "x"]}, "sbatch: 'x' is not an option of sbatch: it must begin with -"),
        ({"sbatch": ["--exclude node3"]}, "is not one option of sbatch: write its value behind ="),
        ({"sbatch": ["--time=1:00"]}, "'--time=1:00' has an option of its own: use --time-limit"),
        ({"sbatch": ["-pgpu"]}, "use --partition"),
    ],
)
def test_invalid_options_are_refused_in_one_sentence(options: dict[str, object], says: str) -> None:
    with pytest.raises(BadInputError) as refused:
        check_slurm(options)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("option", "set_by_stoker"),
    [
        ("--comment=x", "--comment"),
        ("--comm=x", "--comment"),
        ("--job-name=x", "--job-name"),
        ("-Jx", "--job-name"),
        ("--output=x", "--output"),
        ("-o", "--output"),
        ("--error=x", "--error"),
        ("--wrap=true", "--wrap"),
        ("--parsable", "--parsable"),
        ("--array=1-3", "--array"),
        ("-a1-3", "--array"),
        ("--dependency=afterok:1", "--dependency"),
        ("--requeue", "--requeue"),
        ("--no-requeue", "--no-requeue"),
        ("--signal=TERM@60", "--signal"),
        ("--export=ALL", "--export"),
        ("--chdir=/", "--chdir"),
        ("-D/", "--chdir"),
    ],
)
def test_options_that_stoker_sets_are_refused(option: str, set_by_stoker: str) -> None:
    with pytest.raises(BadInputError, match=f"cannot be given to sbatch: Stoker sets {set_by_stoker} itself"):
        check_further(option)


@pytest.mark.parametrize(
    ("name", "wanted", "matches"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100", True),
        ("NVIDIA A100-SXM4-80GB", "h100|A100", True),
        ("NVIDIA A100-SXM4-80GB", "h100|v100", False),
        ("NVIDIA A100-SXM4-80GB", "a10", False),
        ("NVIDIA RTX A1000", "a100", False),
        ("NVIDIA L40S", "l4", False),
        ("NVIDIA L40S", "l40", True),
        ("NVIDIA GeForce RTX 4090", "4090", True),
        ("nvidia_geforce_rtx_4090", "RTX 4090", True),
        ("NVIDIA GeForce RTX 4090", "90", False),
        ("NVIDIA A100 80GB PCIe", "a100 80gb", True),
        ("AMD Instinct MI300X", "mi300", True),
        ("", "a100", False),
    ],
)
def test_model_is_a_part_of_the_name_with_whole_numbers(name: str, wanted: str, matches: bool) -> None:
    assert is_model(name, wanted) is matches
