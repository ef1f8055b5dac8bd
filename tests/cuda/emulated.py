"""Tests of this folder without a GPU: `make test-emulated`, on the driver that `emulator/` builds.

It stands in for `libcuda.so.1`, checks every access to memory, and does what may be reordered in three
orders. A part is a process; several run at once. PARTS are what fits into minutes; with `--all` every test
runs that can (hours: `make test-emulated-slow`). Exit code 1 unless each process passed and skipped nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from tests.cuda.sanitizer import GROUPS

ORDERS = ("first", "late", "random:1")
TESTS = Path(__file__).parent
ROOT = TESTS.parents[1]
FOLDER = ROOT / "target" / "emulator"
NUM_PROCESSES = int(os.environ.get("EMULATED_PROCESSES", str(os.cpu_count() or 1)))


@dataclass(frozen=True)
class Part:
    """Tests that share a process, and in which orders they run; files are relative to this folder.

    `multiprocessors` are those of the emulated GPU, where its own number of them would not do.
    """

    name: str
    tests: tuple[str, ...]
    orders: tuple[str, ...] = ORDERS
    finds_races: bool = False
    multiprocessors: int | None = None

    def arguments(self) -> list[str]:
        """What pytest is given."""
        cannot = [f"--deselect={TESTS.relative_to(ROOT).as_posix()}/{test}" for test in CANNOT]
        return [*cannot, *(str(TESTS / test) for test in self.tests)]


def of_groups(name: str, *groups: str, more: tuple[str, ...] = ()) -> Part:
    """Small cases that the sanitizer sees too, and `more`."""
    chosen = [group for group in GROUPS if group.name in groups]
    tests = tuple(f"{group.file}::{test}" for group in chosen for test in group.tests)
    return Part(name, tests + more, finds_races=True)


# Those that take longest first.
PARTS = (
    Part(
        "engine, FP8",
        (
            "test_fp8_engine.py::test_whole_rows_have_the_bits_of_bf16",
            "test_fp8_engine.py::test_speculation_changes_no_bit[conditional-12-fp8_w8a8]",
            "test_fp8_engine.py::test_speculation_changes_no_bit[spine-40-fp8]",
            "test_fp8_engine.py::test_matrices_without_a_q_view_allow_no_q_pass",
            "test_fp8_engine.py::test_steps_are_replays[fp8_w8a8]",
            "test_planted.py::test_speculation_changes_nothing_of_fp8[tiny-fp8]",
            "test_planted.py::test_speculation_changes_nothing_of_fp8[tiny-fp8_w8a8]",
        ),
        orders=("first", "late"),
    ),
    Part(
        "engine, drafts by estimates",
        ("test_engine.py::test_drafts_by_estimates_are_of_each_request_and_change_no_token",),
        orders=("late",),
    ),
    Part("engine, a whole chunk", ("test_engine.py::test_a_whole_chunk_behind_other_rows_ends",)),
    Part(
        "engine, families",
        (
            "test_engine.py::test_scores_are_near_fp32",
            "test_engine.py::test_the_plan_is_what_is_held",
            "test_fp8_engine.py::test_rounded_rows_are_nearer_to_the_hosts_than_to_whole_ones",
            "test_engine_errors.py::test_a_driver_without_gpus_is_an_error_at_once",
        ),
        orders=("first",),
    ),
    Part(
        "engine, windows",
        (
            "test_families.py::test_every_drafter_has_its_turn",
            "test_families.py::test_prompt_lookup_changes_no_bit[gemma4_unified-tree-bf16]",
            "test_families.py::test_wrong_drafts_change_no_bit[muse_glimmer-muse_assistant-chain-w12]",
        ),
        orders=("random:1",),
    ),
    Part(
        "engine, chunks",
        ("test_prompt_chunks.py::test_chunks_of_any_size_give_the_same_bits[llama_rope_scaling]",),
        orders=("late",),
    ),
    # Several chunks in a launch, the last of them short: where blocks wait for one another most.
    Part(
        "recurrence, chunks",
        ("test_gdn.py::test_a_prompt_in_chunks_is_a_prompt_row_by_row[(1, 2, 128, 128, 4)]",),
        orders=("first",),
        finds_races=True,
    ),
    of_groups(
        "attention",
        "attention",
        "attention, wide heads",
        more=(
            "test_attention_kernel.py::test_a_path_has_one_result[(2, 1, 128)-63]",
            "test_attention_kernel.py::test_heads_that_no_block_holds_are_refused",
        ),
    ),
    of_groups(
        "heads",
        "screened head",
        "screened head, wide",
        more=("test_screened_head_kernel.py::test_estimates_are_always_numbers",),
    ),
    of_groups(
        "matmuls",
        "matmul",
        "matmuls together",
        "fp8 matmul",
        "rows for matmuls",
        more=(
            "test_fp8.py::test_every_code_is_decoded",
            "test_fp8.py::test_codes_that_are_no_numbers_stay_in_their_channel",
            "test_fp8.py::test_values_that_are_no_numbers_stay_in_their_row",
            "test_fp8.py::test_blocks_that_a_note_cannot_hold_are_refused",
            "test_matmul.py::test_a_missing_gpu_is_named",
            "test_matmul.py::test_many_rows_at_the_ends_of_the_range_have_the_bits_of_few",
            "test_matmul.py::test_many_rows_of_matrices_multiplied_together[5120]",
            "test_matmul.py::test_many_rows_are_added_to_the_residual",
            "test_matmul_rows.py::test_parts_of_rows_are_refused",
            "test_matmul_rows.py::test_products_of_many_rows_are_those_of_few[528-600-row_counts3]",
            "test_matmul_rows.py::test_products_of_many_rows_are_those_of_few[1112-600-row_counts5]",
        ),
    ),
    # With five clusters a unit is complete before the run of the one that brings its last octet has ended.
    Part(
        "matmuls of more clusters",
        (
            "test_matmul_rows.py::test_products_of_many_rows_are_those_of_few[48-10300-row_counts7]",
            "test_matmul_rows.py::test_products_of_many_rows_are_those_of_few[1112-2624-row_counts8]",
        ),
        finds_races=True,
        multiprocessors=10,
    ),
    of_groups(
        "recurrence and drafters",
        "gdn",
        "gdn, odd shapes",
        "drafter",
        "drafter's choice",
        more=(
            "test_gdn.py::test_a_path_has_one_result[(1, 2, 128, 128, 4)-70]",
            "test_gdn.py::test_shapes_beyond_the_kernel_are_refused",
            "test_gdn.py::test_more_rows_than_a_pass_has_are_refused",
        ),
    ),
    of_groups(
        "rows",
        "stock",
        "rows",
        "append",
        "planting",
        more=(
            "test_rows.py::test_gates_of_a_long_prompt",
            "test_rows.py::test_normed_heads_are_turned_as_by_two_launches",
            "test_rows.py::test_refused_arguments_name_themselves",
        ),
    ),
)
# Tests none of whose cases is among these: they decode hundreds of tokens, or take shapes as wide as those of
# real models.
LONG = (
    "test_attention_kernel.py::test_a_prompt_in_chunks_is_a_prompt_row_by_row",
    "test_drafter_kernels.py::test_draft_block_of_published_shape",
    "test_engine.py::test_a_folder_of_kernels_may_be_no_folder",
    "test_engine.py::test_an_engine_switches_while_its_launches_are_replayed",
    "test_engine.py::test_batch_mates_and_arrival_order_change_nothing",
    "test_engine.py::test_drafts_made_ahead_are_those_made_in_turn",
    "test_engine.py::test_draws_are_those_of_plain_decoding",
    "test_engine.py::test_greedy_text_departs_from_fp32_at_small_gaps_only",
    "test_engine.py::test_long_prompts_cross_splits_and_states",
    "test_engine.py::test_no_number_of_rows_changes_a_bit",
    "test_engine.py::test_prompts_and_decoding_agree",
    "test_engine.py::test_speculation_changes_no_bit",
    "test_engine.py::test_steps_are_replays_with_few_copies",
    "test_engine.py::test_w12_files_give_the_bits_of_bf16",
    "test_engine_errors.py::test_a_gpu_that_is_not_there_is_named",
    "test_engine_errors.py::test_a_share_of_the_memory_that_is_too_small",
    "test_engine_errors.py::test_weights_that_are_no_numbers_end_the_request",
    "test_planted.py::test_speculation_changes_nothing",
    "test_planted.py::test_the_gpu_plants_the_hosts_fp8",
    "test_prompt_chunks.py::test_long_prompts_arrive_beside_decoding",
    "test_screened_head_kernel.py::test_ids_are_the_dense_ones_on_random_draws",
    "test_screened_head_kernel.py::test_sums_err_no_more_than_bounds_assume",
)

# Tests that need what the emulator is not.
NEEDS_CUBLASLT = "needs cuBLASLt, whose kernels are machine code"
NEEDS_TORCH = "asks torch, which is no part of the tests' environment"
NEEDS_ROOM = "plants a model of gigabytes, whose every pass would take hours"
CANNOT = {
    "test_stock.py": NEEDS_CUBLASLT,
    "test_prompt_chunks.py::test_stock_prompts_are_near_those_in_chunks_of_a_path": NEEDS_CUBLASLT,
    "test_engine.py::test_memory_is_given_back": NEEDS_TORCH,
    "test_engine_errors.py::test_a_plan_of_all_memory_holds": NEEDS_TORCH,
    "test_planted.py::test_large_models_say_the_same_in_both_formats": NEEDS_ROOM,
    "test_planted.py::test_speculation_changes_nothing[qwen3.5-4b-ways3]": NEEDS_ROOM,
    "test_planted.py::test_speculation_changes_nothing_of_fp8[qwen3.5-4b-fp8]": NEEDS_ROOM,
    "test_planted.py::test_speculation_changes_nothing_of_fp8[qwen3.5-4b-fp8_w8a8]": NEEDS_ROOM,
}


@dataclass(frozen=True)
class Verdict:
    """How one part went in one order."""

    order: str
    part: Part
    passed: bool
    seconds: float
    output: str


def environment(order: str, finds_races: bool = False, multiprocessors: int | None = None) -> dict[str, str]:
    """The emulated driver before any other, and device code that it can read."""
    # Matmuls read behind a slice's end what nobody looks at.
    races = {
        "PTX_EMULATOR_CHECK": "races",
        "PTX_EMULATOR_UNWATCHED_READS": "bf16_matmul,w12_matmul,fp8_matmul",
    }
    return {
        **os.environ,
        "LD_LIBRARY_PATH": os.pathsep.join([str(FOLDER), os.environ.get("LD_LIBRARY_PATH", "")]).rstrip(":"),
        "PTX_EMULATOR_ORDER": order,
        "SPECPILOT_KERNEL_CODE": "ptx",
        "SPECPILOT_CACHE_DIR": str(FOLDER / "cache"),
        **(races if finds_races else {}),
        **({"PTX_EMULATOR_MULTIPROCESSORS": str(multiprocessors)} if multiprocessors else {}),
    }


def compile_kernels() -> None:
    """Once for all processes."""
    command = [sys.executable, "-m", "specpilot_rs.cli", "precompile", "--arch", "sm_90a"]
    subprocess.run(command, env=environment(ORDERS[0]), check=True, capture_output=True)


def run(order: str, part: Part) -> Verdict:
    """Runs a part in an order; races are found in any, so that one looks for them."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *part.arguments()]
    start_s = time.monotonic()
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(order, part.finds_races and order == ORDERS[0], part.multiprocessors),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - start_s
    # A skipped test has seen nothing.
    passed = result.returncode == 0 and " skipped" not in result.stdout
    return Verdict(order, part, passed, seconds, result.stdout)


def main() -> None:
    """Runs every part in every order, and shows whole what fails."""
    parts = PARTS
    if sys.argv[1:] == ["--all"]:
        files = sorted(file.name for file in TESTS.glob("test_*.py"))
        parts = tuple(Part(file, (file,)) for file in files if file not in CANNOT)
    elif sys.argv[1:]:
        sys.exit(f"error: expected --all or nothing, got {' '.join(sys.argv[1:])}")
    compile_kernels()
    num_passed = 0
    with ThreadPoolExecutor(NUM_PROCESSES) as pool:
        running = [pool.submit(run, order, part) for part in parts for order in part.orders]
        for done in as_completed(running):
            verdict = done.result()
            name = f"{verdict.part.name}, {verdict.order}"
            outcome = "passed" if verdict.passed else "FAILED"
            print(f"{name:<44} {verdict.seconds:6.1f} s  {outcome}", flush=True)
            num_passed += verdict.passed
            if not verdict.passed:
                print(f"{verdict.output}\n", flush=True)
    print(f"{num_passed} of {len(running)} passed")
    sys.exit(num_passed < len(running))


if __name__ == "__main__":
    main()
