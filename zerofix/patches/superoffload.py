"""SuperOffload crashes or trains wrong with more than one parameter group or subgroup."""

from __future__ import annotations

from zerofix.fix import Fix, Replace, Target
from zerofix.patches import superoffload_step
from zerofix.superoffload.methods import SUPEROFFLOAD, TARGETS, plain, start
from zerofix.superoffload.mode import hit_by, modes

FIX = Fix(
    name="superoffload",
    title="SuperOffload trains every group and every subgroup, bit for bit as plain offload",
    symptom=(
        "With super_offload, training ends with a KeyError with several parameter groups or with "
        "one subgroup, and trains wrong weights in silence with several subgroups of one group. "
        "On 0.18.0 to 0.18.3 it cannot start ('got multiple values for argument')."
    ),
    cause=(
        "Subgroups are counted anew in each parameter group, and only where a group has several; "
        "the worker knows one group. Gradients of a subgroup are sent as they come, and the "
        "model never gets the weights back. The constructor lacks param_names."
    ),
    upstream=("#7906", "#7905", "#7715"),
    introduced="0.18.0",
    fixed="0.18.9",
    hit_by=hit_by,
    targets=(
        Target(f"{SUPEROFFLOAD}.__init__", Replace(start)),
        Target(f"{SUPEROFFLOAD}._create_fp16_sub_groups", plain("_create_fp16_sub_groups")),
        Target(
            f"{SUPEROFFLOAD}.reduce_independent_p_g_buckets_and_remove_grads",
            plain("reduce_independent_p_g_buckets_and_remove_grads"),
        ),
        Target(
            f"{SUPEROFFLOAD}._reassign_or_swap_out_partitioned_parameters",
            plain("_reassign_or_swap_out_partitioned_parameters"),
        ),
        *TARGETS,
    ),
    limits=superoffload_step.FIX.limits,
    modes=modes,
)
