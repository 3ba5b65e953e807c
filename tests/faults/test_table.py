"""docs/reference/faults.md promises no more than the tests show."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import zfun as zf

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "faults.md"
FAULTS, UNIT, LAWS, REAL = "tests/faults", "tests/unit", "tests/property", "tests/distributed"

# The tests of each row: a file, and functions in the file.
ROWS: dict[int, dict[str, list[str]]] = {
    1: {
        f"{FAULTS}/test_losses.py": ["test_the_others_name_a_lost_rank_in_time"],
        f"{FAULTS}/test_runs.py": [
            "test_a_run_goes_on_after_a_kill_and_a_sigterm_with_other_numbers_of_ranks",
            "test_torchrun_starts_a_killed_run_again_and_passes_sigterm_on",
        ],
        f"{FAULTS}/test_two_nodes.py": [
            "test_a_cut_link_is_an_error_that_names_a_rank_of_the_other_node"
        ],
        f"{REAL}/test_processes.py": ["test_a_dead_rank_is_named"],
    },
    2: {
        f"{UNIT}/checkpoint/test_faults.py": [
            "test_a_process_killed_at_any_operation_loses_no_checkpoint",
            "test_a_process_that_kills_itself_loses_no_checkpoint",
            "test_a_power_loss_at_any_operation_loses_no_checkpoint",
        ],
        f"{REAL}/test_checkpoints.py": [
            "test_a_rank_that_is_killed_in_a_save_leaves_the_last_checkpoint",
            "test_a_rank_that_dies_while_it_publishes_is_missed_by_those_that_wait",
        ],
        f"{FAULTS}/test_soak.py": ["test_a_kill_at_a_system_call_of_a_save_loses_nothing"],
    },
    3: {
        f"{UNIT}/checkpoint/test_checkpoint.py": [
            "test_an_error_in_the_background_surfaces_at_the_next_step",
            "test_an_outcome_that_the_disk_does_not_take_goes_over_the_group",
            "test_steps_go_on_during_a_save",
        ]
    },
    4: {
        f"{UNIT}/checkpoint/test_faults.py": [
            "test_an_operation_that_fails_is_an_error_on_all_ranks",
            "test_a_full_disk_leaves_no_rubbish",
        ]
    },
    5: {
        f"{UNIT}/stores/test_nvme.py": [
            "test_a_step_that_fails_leaves_the_state_wherever_the_fault_is",
            "test_no_rank_commits_a_step_that_fails_on_another",
            "test_too_little_room_is_refused_at_init",
        ]
    },
    6: {f"{UNIT}/checkpoint/test_faults.py": ["test_a_file_cut_at_any_place_is_found"]},
    7: {
        f"{UNIT}/checkpoint/test_faults.py": ["test_a_thousand_flipped_bits_are_found"],
        f"{UNIT}/checkpoint/test_tools.py": ["test_verify_names_file_offset_and_leaf"],
    },
    8: {
        f"{LAWS}/test_checkpoint.py": [
            "test_a_loaded_state_has_the_values_that_were_saved",
            "test_a_loaded_run_goes_on_as_one_that_never_stopped",
        ]
    },
    9: {
        f"{UNIT}/checkpoint/test_checkpoint.py": [
            "test_trees_that_differ_are_listed_with_the_nearest_names",
            "test_another_optimizer_is_refused_before_anything_changes",
        ]
    },
    10: {
        f"{UNIT}/checkpoint/test_checkpoint.py": [
            "test_trees_that_differ_are_listed_with_the_nearest_names",
            "test_digits_are_lost_only_where_asked",
        ]
    },
    11: {
        f"{FAULTS}/test_ranks_disagree.py": [
            "test_ranks_that_disagree_raise_before_any_bucket_is_sent"
        ]
    },
    12: {
        f"{FAULTS}/test_ranks_disagree.py": [
            "test_ranks_that_disagree_raise_before_any_bucket_is_sent",
            "test_broadcast_takes_the_values_of_rank_0",
        ]
    },
    13: {f"{LAWS}/test_laws.py": ["test_gradients_that_are_not_finite_skip_the_step"]},
    14: {
        f"{FAULTS}/test_branches.py": [
            "test_a_rank_may_take_another_branch",
            "test_a_leaf_that_no_rank_uses_has_gradient_zero",
        ]
    },
    15: {
        f"{FAULTS}/test_frozen.py": [
            "test_frozen_leaves_are_equal_across_stages_and_do_not_move",
            "test_another_trainable_set_needs_another_state",
        ]
    },
    16: {
        f"{FAULTS}/test_ties.py": [
            "test_the_gradient_of_tied_leaves_is_the_sum",
            "test_a_tie_that_is_broken_or_made_later_is_refused",
        ]
    },
    17: {
        f"{FAULTS}/test_leaves.py": ["test_leaves_of_any_kind_train_as_in_plain_torch"],
        f"{UNIT}/recipes/test_zero.py": ["test_ranks_beyond_the_elements_take_part"],
    },
    18: {
        f"{FAULTS}/test_leaves.py": [
            "test_leaves_of_any_kind_train_as_in_plain_torch",
            "test_leaves_that_cannot_be_trained_are_refused_by_name",
        ]
    },
    19: {
        f"{FAULTS}/test_leaves.py": [
            "test_leaves_of_any_kind_train_as_in_plain_torch",
            "test_leaves_that_cannot_be_trained_are_refused_by_name",
        ]
    },
    20: {
        f"{FAULTS}/test_donation.py": [
            "test_using_a_donated_state_names_the_step_that_took_the_buffers"
        ],
        f"{FAULTS}/test_collectives.py": [
            "test_a_state_is_whole_or_given_up_after_an_update_that_failed"
        ],
    },
    21: {
        f"{FAULTS}/test_options.py": [
            "test_options_are_checked_before_anything_runs",
            "test_impossible_compositions_are_refused",
        ]
    },
    22: {
        f"{FAULTS}/test_collectives.py": [
            "test_a_disturbed_collective_ends_in_an_error_or_in_the_right_state",
            "test_a_different_collective_is_named_with_both_ranks",
        ],
        f"{REAL}/test_processes.py": ["test_different_collectives_are_named_on_both_ranks"],
    },
    23: {
        f"{FAULTS}/test_losses.py": ["test_the_others_name_a_lost_rank_in_time"],
        f"{FAULTS}/test_raised.py": [
            "test_a_rank_that_raises_in_mid_step_ends_all_ranks_with_the_same_error"
        ],
        f"{REAL}/test_processes.py": [
            "test_a_rank_that_raises_is_quoted_by_the_others",
            "test_a_stopped_rank_is_an_error_after_the_timeout",
        ],
    },
    24: {
        f"{UNIT}/checkpoint/test_hostile.py": ["test_a_hostile_manifest_is_refused"],
        f"{UNIT}/checkpoint/test_faults.py": [
            "test_files_that_are_no_files_are_refused",
            "test_reading_opens_only_files_of_the_checkpoint",
        ],
        f"{UNIT}/sources/test_hostile.py": [
            "test_damaged_input_is_refused_or_read_right",
            "test_every_byte_that_torch_wrote_is_compared_with_its_checksum",
            "test_a_tuple_that_repeats_itself_is_refused_before_its_hash_is_taken",
            "test_the_first_file_of_a_folder_is_no_link_out",
        ],
    },
    25: {
        f"{FAULTS}/test_rendezvous.py": [
            "test_a_port_that_another_program_has_is_an_error_that_names_the_port",
            "test_two_jobs_of_one_machine_choose_free_ports",
        ],
        f"{REAL}/test_restarts.py": ["test_keys_of_ranks_that_have_ended_are_not_read"],
        f"{UNIT}/checkpoint/test_checkpoint.py": ["test_one_job_saves_to_a_path"],
    },
    26: {
        f"{UNIT}/checkpoint/test_objects.py": [
            "test_a_process_killed_at_any_request_loses_no_checkpoint"
        ],
        f"{REAL}/test_checkpoints.py": [
            "test_a_rank_killed_at_any_request_leaves_the_last_checkpoint"
        ],
    },
    27: {
        f"{UNIT}/checkpoint/test_objects.py": [
            "test_a_request_that_fails_is_an_error_on_all_ranks_or_none",
            "test_a_store_that_fails_for_good_is_an_error_in_time",
            "test_the_client_repeats_what_fails_once",
        ]
    },
    28: {
        f"{UNIT}/checkpoint/test_objects.py": [
            "test_a_save_that_was_given_up_stays_given_up",
            "test_of_two_jobs_on_one_path_one_is_refused",
        ]
    },
}


def on_the_page() -> dict[int, list[str]]:
    """Return the cells of each row: fault, behaviour, error, remedy."""
    found = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[0].isdecimal():
            assert int(cells[0]) not in found
            found[int(cells[0])] = cells[1:]
    return found


def text_of(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_the_page_has_28_rows_and_each_has_tests() -> None:
    assert sorted(on_the_page()) == sorted(ROWS) == list(range(1, 29))


@pytest.mark.parametrize("row", ROWS)
def test_the_tests_of_a_row_exist_and_expect_the_error_of_the_row(row: int) -> None:
    for path, names in ROWS[row].items():
        defined = {node.name for node in ast.parse(text_of(path)).body if hasattr(node, "name")}
        assert set(names) <= defined, path
    _, behaviour, errors, _ = on_the_page()[row]
    assert behaviour
    named = re.findall(r"`(\w+)`", errors)
    assert named or errors == "none"
    for name in named:
        assert issubclass(getattr(zf.errors, name), zf.ZfunError)
        assert any(name in text_of(path) for path in ROWS[row]), name
