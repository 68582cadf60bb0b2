"""Trains a model whose one parameter group has two subgroups, with and without SuperOffload."""

MEASURES = (
    "largest difference of a master weight to plain ZeRO-3 offload after 5 steps of SuperOffload, "
    "two subgroups (infinite where it cannot start)"
)
TOLERANCE = 0.0


def run() -> float:
    from zerofix.repro._superoffload import error

    return error(sub_group_size=200, unused=False)
