"""Small cases of every kernel's tests under compute-sanitizer: `make test-sanitizer`.

Memcheck finds accesses outside of an allocation or at a wrong address, racecheck two threads that meet in
shared memory without a barrier between. A group of tests is a process; several run at once. Exit code 1
unless each process passed its tests and the tool, which says so in its own summary, found nothing. Arguments
name tools; without any, all run. Needs CUDA's compute-sanitizer and a GPU.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import product
from pathlib import Path

CLEAN = {
    "memcheck": "ERROR SUMMARY: 0 errors",
    "racecheck": "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
}
LIMIT_S = float(os.environ.get("SANITIZER_LIMIT_S", "600"))
NUM_PROCESSES = int(os.environ.get("SANITIZER_PROCESSES", str(os.cpu_count() or 1)))
TESTS = Path(__file__).parent


@dataclass(frozen=True)
class Group:
    """Tests of one file that share a process, and the kernels that they are there for."""

    name: str
    stems: tuple[str, ...]
    file: str
    tests: tuple[str, ...]

    def node_ids(self) -> list[str]:
        """What pytest is given."""
        return [f"{TESTS / self.file}::{test}" for test in self.tests]


GROUPS = (
    Group(
        "matmul",
        ("bf16_matmul", "w12_matmul"),
        "test_matmul.py",
        (
            "test_a_row_has_one_result[0.004-16-128]",
            "test_a_row_has_one_result[0.0004-109-250]",
            "test_a_row_has_one_result[0.004-48-2560]",
            "test_views_and_residual_agree_with_the_host",
            "test_many_rows_have_the_bits_of_few[109-250-300]",
        ),
    ),
    Group(
        "matmuls together",
        ("bf16_matmul", "w12_matmul"),
        "test_matmul.py",
        (
            "test_matrices_multiplied_together_keep_their_bits[250-matrices0]",
            "test_matrices_multiplied_together_keep_their_bits[2560-matrices3]",
            "test_a_row_has_one_result[0.0004-160-6144]",
        ),
    ),
    Group(
        "fp8 matmul",
        ("fp8_matmul",),
        "test_fp8.py",
        (
            "test_whole_activations_give_the_bits_of_dequantised_weights[16-128-tensor-whole]",
            "test_whole_activations_give_the_bits_of_dequantised_weights[109-250-block-short]",
            "test_quantised_activations_match_the_oracle_and_the_host[48-2560-channel]",
            "test_matrices_multiplied_together_keep_their_bits[250-True]",
            "test_small_whole_numbers_are_multiplied_exactly",
        ),
    ),
    Group(
        "rows for matmuls",
        ("block_conv", "gate", "gdn_wy", "rms_norm"),
        "test_matmul_rows.py",
        (
            "test_norms",
            "test_gates",
            "test_convolutions",
            "test_gated_delta_outputs[shape1-9]",
            "test_gated_delta_outputs[shape2-40]",
            "test_products_are_those_of_fp32_rows[250-cuda]",
            "test_products_of_many_rows_are_those_of_few[48-600-row_counts0]",
        ),
    ),
    Group(
        "attention",
        ("tree_attention",),
        "test_attention_kernel.py",
        (
            "test_rows_see_their_prefix_and_ancestors[(2, 1, 128)-None]",
            "test_rows_see_their_prefix_and_ancestors[(2, 1, 128)-40]",
            "test_rows_see_their_prefix_and_ancestors[(6, 2, 24)-300]",
            "test_rows_see_their_prefix_and_ancestors[(4, 4, 72)-1]",
            "test_windows_through_a_ring_of_pages[(2, 1, 128)-66-2]",
            "test_newer_positions_in_a_ring_are_not_read[(2, 1, 128)-65-2]",
            "test_large_scores_do_not_overflow",
        ),
    ),
    Group(
        "attention, wide heads",
        ("tree_attention",),
        "test_attention_kernel.py",
        (
            "test_rows_see_their_prefix_and_ancestors[(24, 4, 256)-None]",
            "test_rows_see_their_prefix_and_ancestors[(16, 1, 512)-40]",
            "test_rows_see_their_prefix_and_ancestors[(12, 2, 300)-None]",
        ),
    ),
    Group(
        "gdn",
        ("gdn_wy", "gdn_fold"),
        "test_gdn.py",
        (
            "test_trees_follow_the_recurrence[(1, 2, 128, 128, 4)-decay]",
            "test_the_next_anchor_follows_the_recurrence[(1, 2, 128, 128, 4)]",
            "test_the_next_anchor_follows_the_recurrence[(2, 6, 24, 40, 4)]",
        ),
    ),
    Group(
        "gdn, odd shapes",
        ("gdn_wy", "gdn_fold"),
        "test_gdn.py",
        (
            "test_trees_follow_the_recurrence[(2, 6, 24, 40, 4)-weak_decay]",
            "test_trees_follow_the_recurrence[(3, 3, 16, 16, 2)-strong_decay]",
        ),
    ),
    Group(
        "stock",
        ("gdn_recurrent", "round_rows"),
        "test_stock_kernels.py",
        (
            "test_chains_follow_the_recurrence[(1, 2, 128, 128, 4)-decay]",
            "test_chains_follow_the_recurrence[(3, 3, 16, 8, 2)-weak_decay]",
            "test_states_come_forward_over_the_log[(2, 6, 24, 40, 4)]",
            "test_plain_rows",
            "test_normed",
            "test_halves_of_a_merged_projection[41-silu]",
            "test_normed_heads_gated_by_a_part_of_longer_rows",
        ),
    ),
    Group(
        "rows",
        ("embed_rows", "gate", "gather_taps", "greedy_argmax", "rms_norm", "rope", "shape_logits"),
        "test_rows.py",
        (
            "test_embedding_rows_are_exact_copies",
            "test_shaped_logits",
            "test_rms_norm_is_right_and_knows_no_neighbours[17]",
            "test_rms_norm_is_right_and_knows_no_neighbours[513]",
            "test_rms_norm_is_right_and_knows_no_neighbours[5376]",
            "test_sums_of_norm_and_residual[15]",
            "test_sums_of_norm_and_residual[6656]",
            "test_rope_turns_by_the_rows_position_alone",
            "test_gates",
            "test_taps_lie_side_by_side",
            "test_the_largest_logit_wins_as_on_the_host",
            "test_wide_rows_tie_to_the_lowest_id",
        ),
    ),
    Group("append", ("append_kv", "append_ring"), "test_append.py", ("test_pages", "test_rings")),
    Group(
        "drafter",
        ("block_conv", "draft_block"),
        "test_drafter_kernels.py",
        (
            "test_block_conv_gives_the_hosts_bits",
            "test_draft_block_sees_what_the_host_sees[context_lens1-True-None]",
            "test_draft_block_sees_what_the_host_sees[context_lens2-False-64]",
            "test_draft_block_sees_what_the_host_sees[context_lens3-True-200]",
            "test_draft_block_head_layouts[6-6-2]",
            "test_draft_block_head_layouts[200-6-2]",
            "test_draft_block_head_layouts[256-8-8]",
        ),
    ),
    Group(
        "drafter's choice",
        ("draft_select",),
        "test_drafter_kernels.py",
        (
            "test_draft_select_marginals[5-1000-options1]",
            "test_draft_select_marginals[5-5-options0]",
            "test_draft_select_ties_go_to_the_lowest_ids[7-64]",
            "test_draft_select_scores_pairs[16-64-options2]",
            "test_draft_select_scores_pairs[33-70-options0]",
            "test_sampled_rows_are_the_hosts",
        ),
    ),
    Group(
        "screened head",
        ("lm_head_screen",),
        "test_screened_head_kernel.py",
        (
            "test_both_scans_keep_the_same_channels",
            "test_masks_and_equal_rows",
            "test_gaps_are_those_of_the_logits",
            "test_estimates_of_all_logits[203-300-5-auto]",
            "test_estimates_of_all_logits[203-300-5-mma]",
            "test_estimates_of_all_logits[130-700-16-auto]",
            "test_estimates_of_all_logits[70-512-40-mma]",
            "test_estimates_of_all_logits[150-5120-20-auto]",
            "test_estimates_of_all_logits[150-5120-40-auto]",
        ),
    ),
    Group(
        "screened head, wide",
        ("lm_head_screen",),
        "test_screened_head_kernel.py",
        ("test_wide_heads_with_near_ties[2000-17408-9-auto]",),
    ),
    Group(
        "planting",
        ("plant_matrix",),
        "test_planted.py",
        (
            "test_the_gpu_plants_the_hosts_bits",
            "test_every_layout_holds_these_bits[shape1]",
            "test_views_are_near_all_but_small_weights[shape1]",
        ),
    ),
)


@dataclass(frozen=True)
class Verdict:
    """What one tool said of one group."""

    tool: str
    group: Group
    is_clean: bool
    outcome: str
    seconds: float
    output: str


def program() -> str:
    """The sanitizer, on the path or where CUDA's toolkit puts it."""
    found = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if found is None:
        sys.exit("error: compute-sanitizer is missing; install CUDA's toolkit or put it on the path")
    return found


def check(tool: str, group: Group) -> Verdict:
    """Runs a group under a tool."""
    command = [
        program(),
        "--tool",
        tool,
        "--error-exitcode",
        "9",
        "--print-limit",
        "20",
        sys.executable,
        "-m",
    ]
    command += ["pytest", "-v", "-x", "-rs", "-p", "no:cacheprovider", *group.node_ids()]
    start_s = time.monotonic()
    # In a session of its own, so that a process that is late ends with those it started.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
        outcome = f"exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        outcome = f"more than {LIMIT_S:g} s"
    seconds = time.monotonic() - start_s
    # A skipped test has launched nothing, so that a tool which found nothing has seen nothing.
    is_clean = process.returncode == 0 and CLEAN[tool] in output and " skipped" not in output
    return Verdict(tool, group, is_clean, "clean" if is_clean else outcome, seconds, output)


def main() -> None:
    """Checks every group with every tool asked for, and shows whole what is not clean."""
    tools = sys.argv[1:] or list(CLEAN)
    if unknown := set(tools) - set(CLEAN):
        sys.exit(f"error: expected {' or '.join(CLEAN)}, got {', '.join(sorted(unknown))}")
    num_clean = 0
    with ThreadPoolExecutor(NUM_PROCESSES) as pool:
        running = [pool.submit(check, *job) for job in product(tools, GROUPS)]
        for done in as_completed(running):
            verdict = done.result()
            name = f"{verdict.tool}, {verdict.group.name}"
            print(f"{name:<36} {verdict.seconds:6.1f} s  {verdict.outcome}", flush=True)
            num_clean += verdict.is_clean
            if not verdict.is_clean:
                print(f"{verdict.output}\n", flush=True)
    print(f"{num_clean} of {len(running)} clean")
    sys.exit(num_clean < len(running))


if __name__ == "__main__":
    main()
