"""GPUs selected by an environment or by a user."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import BadInputError
from stoker.gpus.model import Gpu, Unknown
from stoker.gpus.visible import select_gpus, visible_gpus

NOT_REPORTED = Unknown("not reported")


def gpu(index: int, uuid: str, vendor: str = "nvidia", parent: str | None = None) -> Gpu:
    return Gpu(uuid, index, "a GPU", vendor, NOT_REPORTED, 2**30, NOT_REPORTED, parent)


# The second and third uuid begin alike.
FOUR = (gpu(0, "GPU-aaaa1111"), gpu(1, "GPU-bbbb1111"), gpu(2, "GPU-bbbb2222"), gpu(3, "GPU-cccc1111"))
AMD = (gpu(0, "GPU-00AA", "amd"), gpu(1, "GPU-00BB", "amd"), gpu(2, "GPU-11CC", "amd"))
# The first GPU is partitioned into two slices and not listed itself.
MIG = (
    gpu(0, "MIG-0001", parent="GPU-cut"),
    gpu(1, "MIG-0002", parent="GPU-cut"),
    gpu(2, "GPU-whole1"),
    gpu(3, "GPU-whole2"),
)

ENTRIES = st.sampled_from(
    [
        *("0", "1", "2", "3", "4", "-1", "+1", " 2 ", "1x", "00", "9" * 5000, "", "NoDevFiles", "all"),
        *(each.uuid for each in (*FOUR, *AMD, *MIG)),
        *("GPU-", "GPU-a", "GPU-bbbb", "gpu-aaaa1111", "MIG-", "GPU-cut"),
    ]
)
LISTS = st.lists(ENTRIES | st.text(max_size=4), max_size=6).map(",".join)


def indices(gpus: tuple[Gpu, ...]) -> list[int]:
    return [each.index for each in gpus]


def seen(gpus: tuple[Gpu, ...], **environment: str) -> list[int]:
    return indices(visible_gpus(gpus, environment))


class TestCuda:
    def test_all_gpus_are_visible_without_the_variable(self) -> None:
        assert seen(FOUR) == [0, 1, 2, 3]
        assert seen(FOUR, ROCR_VISIBLE_DEVICES="0", HIP_VISIBLE_DEVICES="0", PATH="0") == [0, 1, 2, 3]

    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            ("", []),
            ("2", [2]),
            ("3,0", [3, 0]),
            (" 1 , 2 ", [1, 2]),
            ("+1", [1]),
            ("1st,2nd", [1, 2]),
            ("-1", []),
            ("NoDevFiles", []),
            ("none", []),
            ("all", []),
            ("4", []),
            ("9" * 5000, []),
            ("0,2,-1,1", [0, 2]),
            ("0,4,1", [0]),
            ("0,,1", [0]),
            ("0,1,", [0, 1]),
            ("0,0", []),
            ("1,0,1", []),
            ("0,4,0", [0]),  # What comes after an invalid entry is not even a duplicate.
            ("GPU-cccc1111,GPU-aaaa1111", [3, 0]),
            ("GPU-c", [3]),
            ("GPU-bbbb2", [2]),
            ("GPU-bbbb", []),
            ("GPU-aaaa,GPU-bbbb,GPU-cccc", [0]),
            ("GPU-aaaa1111,GPU-a", []),
            ("GPU-aaaa1111x", []),
            ("aaaa1111", []),
            ("GPU", []),
            ("0,GPU-bbbb1111", [0]),
            ("GPU-bbbb1111,0", [1]),
        ],
    )
    def test_variable_is_read_as_cuda_reads_it(self, value: str, expected: list[int]) -> None:
        assert seen(FOUR, CUDA_VISIBLE_DEVICES=value) == expected

    @pytest.mark.parametrize("value", ["", " ", "G", "GPU", "1", "-1"])
    def test_only_gpu_of_a_machine_must_be_listed_too(self, value: str) -> None:
        assert seen(FOUR[:1], CUDA_VISIBLE_DEVICES=value) == []

    def test_numbers_count_in_the_order_of_indices(self) -> None:
        assert seen(tuple(reversed(FOUR)), CUDA_VISIBLE_DEVICES="0,3") == [0, 3]

    def test_simulated_gpus_follow_the_same_rules(self) -> None:
        sims = (gpu(0, "GPU-5100", "sim"), gpu(1, "GPU-5101", "sim"))
        assert seen(sims) == [0, 1]
        assert seen(sims, CUDA_VISIBLE_DEVICES="1") == [1]
        assert seen(sims, CUDA_VISIBLE_DEVICES="") == []

    @given(st.permutations(FOUR), st.integers(0, 4))
    def test_full_uuids_or_indices_select_those_in_order(self, order: list[Gpu], size: int) -> None:
        chosen = tuple(order[:size])
        for names in ([each.uuid for each in chosen], [str(each.index) for each in chosen]):
            assert visible_gpus(FOUR, {"CUDA_VISIBLE_DEVICES": ",".join(names)}) == chosen

    @given(st.permutations(range(4)), st.integers(1, 4), st.sampled_from(["-1", "x", "", "4"]), LISTS)
    def test_entries_after_the_first_invalid_one_are_ignored(
        self, order: list[int], size: int, invalid: str, rest: str
    ) -> None:
        valid = ",".join(map(str, order[:size]))
        assert seen(FOUR, CUDA_VISIBLE_DEVICES=f"{valid},{invalid},{rest}") == order[:size]


class TestMigSlices:
    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            ("MIG-0002", [1]),
            ("MIG-0002,MIG-0001", [1]),
            ("MIG-0002,GPU-whole1", [1]),
            ("MIG-", []),
            ("GPU-cut", [0]),
            ("0", [0]),
            ("1", [2]),
            ("1,2", [2, 3]),
            ("2,0", [0]),
            ("3", []),
        ],
    )
    def test_program_sees_one_slice_or_whole_gpus(self, value: str, expected: list[int]) -> None:
        assert seen(MIG, CUDA_VISIBLE_DEVICES=value) == expected

    def test_program_without_the_variable_sees_only_the_first_slice(self) -> None:
        assert seen(MIG) == [0]

    def test_partitioned_gpu_may_be_listed_beside_its_slices(self) -> None:
        listed = (gpu(0, "GPU-cut"), gpu(1, "MIG-0001", parent="GPU-cut"), gpu(2, "GPU-whole"))
        assert seen(listed, CUDA_VISIBLE_DEVICES="0") == [1]
        assert seen(listed, CUDA_VISIBLE_DEVICES="1") == [2]
        assert seen(listed, CUDA_VISIBLE_DEVICES="GPU-cut") == [1]


class TestAmd:
    @pytest.mark.parametrize(
        ("rocr", "expected"),
        [
            ("", []),
            ("2,0", [2, 0]),
            ("0,GPU-11CC", [0, 2]),
            ("gpu-11cc", [2]),
            ("GPU-1", [2]),
            ("GPU-0", []),
            ("GPU-", []),
            ("0,5,1", [0]),
            ("1,0,1", [1, 0]),
            ("-1", []),
        ],
    )
    def test_runtimes_variable_is_read_as_rocm_reads_it(self, rocr: str, expected: list[int]) -> None:
        assert seen(AMD, ROCR_VISIBLE_DEVICES=rocr) == expected

    @pytest.mark.parametrize(
        ("hip", "expected"),
        [
            ("", [0, 1, 2]),
            ("1", [1]),
            ("2,0", [2, 0]),
            ("0, 1", [0]),
            ("01", []),
            ("1,1,0", [1, 0]),
            ("0,-1,1", [0]),
            ("GPU-11CC,0", [2, 0]),
            ("0x1", []),
        ],
    )
    @pytest.mark.parametrize("variable", ["HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"])
    def test_hips_variables_are_read_as_hip_reads_them(self, variable: str, hip: str, expected: list[int]) -> None:
        assert indices(visible_gpus(AMD, {variable: hip})) == expected

    def test_hip_selects_from_the_gpus_left_by_the_runtime(self) -> None:
        assert seen(AMD, ROCR_VISIBLE_DEVICES="2,1", HIP_VISIBLE_DEVICES="0") == [2]
        assert seen(AMD, ROCR_VISIBLE_DEVICES="2,1", CUDA_VISIBLE_DEVICES="2") == []
        assert seen(AMD, ROCR_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="0") == []

    def test_hip_variable_takes_precedence_over_the_cuda_variable(self) -> None:
        assert seen(AMD, HIP_VISIBLE_DEVICES="1", CUDA_VISIBLE_DEVICES="2") == [1]


def test_each_vendor_counts_its_own_gpus() -> None:
    mixed = (gpu(0, "GPU-i", "intel"), gpu(1, "GPU-x", "amd"), gpu(2, "GPU-n"), gpu(3, "GPU-y", "amd"))
    environment = {"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1"}
    assert indices(visible_gpus(mixed, environment)) == [0, 3, 2]


@given(cuda=LISTS, rocr=LISTS, hip=LISTS, gpus=st.sampled_from([FOUR, AMD, MIG, (*AMD, *FOUR), ()]))
def test_any_environment_shows_each_gpu_at_most_once(cuda: str, rocr: str, hip: str, gpus: tuple[Gpu, ...]) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": cuda, "ROCR_VISIBLE_DEVICES": rocr, "HIP_VISIBLE_DEVICES": hip}
    result = visible_gpus(gpus, environment)
    assert len({each.uuid for each in result}) == len(result)
    assert set(result) <= set(gpus)


class TestSelection:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("all", [0, 1, 2, 3]),
            (" ALL ", [0, 1, 2, 3]),
            ("2", [2]),
            ("3,1", [3, 1]),
            ("0-2", [0, 1, 2]),
            ("1 - 2 , 0", [1, 2, 0]),
            ("0-2,1,3", [0, 1, 2, 3]),
            ("GPU-cccc1111", [3]),
            ("gpu-C", [3]),
            ("GPU-bbbb2,0", [2, 0]),
        ],
    )
    def test_numbers_ranges_and_uuids_can_be_mixed(self, text: str, expected: list[int]) -> None:
        assert indices(select_gpus(FOUR, text)) == expected

    @pytest.mark.parametrize(
        ("text", "sentence"),
        [
            ("7", "there is no GPU 7 here: this machine has 0, 1, 2, 3"),
            ("2-999999999", "there is no GPU 4 here: this machine has 0, 1, 2, 3"),
            ("3-1", "'3-1' runs backwards: write 1-3"),
            ("GPU-b", "'GPU-b' may be any of 2 GPUs: this machine has 0 (GPU-aaaa1111), 1 (GPU-bbbb1111), "),
            ("RTX", "'RTX' is no GPU here: write all, 0, 0,2, 0-3 or a uuid; this machine has 0 (GPU-aaaa"),
            ("0,,1", "'' is no GPU here: write all, 0, 0,2, 0-3 or a uuid; this machine has 0 (GPU-aaaa"),
            ("", "'' is no GPU here: "),
            ("-1", "'-1' is no GPU here: "),
            ("0,all", "'all' is no GPU here: "),
            ("9" * 5000, "is no GPU here: "),
        ],
    )
    def test_invalid_input_is_refused_with_the_available_gpus(self, text: str, sentence: str) -> None:
        with pytest.raises(BadInputError) as caught:
            select_gpus(FOUR, text)
        assert sentence in str(caught.value)

    def test_machine_without_gpus_is_reported(self) -> None:
        assert select_gpus((), "all") == ()
        with pytest.raises(BadInputError, match="there is no GPU 0 here: this machine has none at all"):
            select_gpus((), "0")

    def test_indices_are_those_shown_not_positions(self) -> None:
        assert indices(select_gpus((FOUR[1], FOUR[3]), "3")) == [3]
        with pytest.raises(BadInputError, match="there is no GPU 2 here: this machine has 1, 3"):
            select_gpus((FOUR[1], FOUR[3]), "1-3")

    def test_uuid_that_is_a_prefix_of_another_is_exact(self) -> None:
        alike = (gpu(0, "GPU-1"), gpu(1, "GPU-12"))
        assert indices(select_gpus(alike, "GPU-1")) == [0]

    def test_partitioned_gpu_selects_all_its_slices(self) -> None:
        assert indices(select_gpus(MIG, "GPU-cut")) == [0, 1]
        assert indices(select_gpus(MIG, "MIG-0002")) == [1]
        assert indices(select_gpus(MIG, "1-2")) == [1, 2]

    @given(text=LISTS, gpus=st.sampled_from([FOUR, MIG, ()]))
    def test_any_text_selects_each_gpu_at_most_once_or_is_refused(self, text: str, gpus: tuple[Gpu, ...]) -> None:
        try:
            chosen = select_gpus(gpus, text)
        except BadInputError:
            return
        assert chosen or not gpus
        assert len({each.uuid for each in chosen}) == len(chosen)
        assert set(chosen) <= set(gpus)

    @given(st.permutations(FOUR), st.integers(1, 4))
    def test_any_selection_of_gpus_can_be_written(self, order: list[Gpu], size: int) -> None:
        chosen = tuple(order[:size])
        assert select_gpus(FOUR, ",".join(str(each.index) for each in chosen)) == chosen
        assert select_gpus(FOUR, ",".join(each.uuid for each in chosen)) == chosen
