"""The table of the design, row by row, with the bodies of the real releases."""

import json
from importlib import resources

import pytest
from packaging.version import Version

from zerofix.gate import State, decide, known_bodies, short
from zerofix.patches import CATALOGUE, copy_grads, cpu_adam, grad_accumulation
from zerofix.source import ABSENT

RELEASES = json.loads(resources.files("zerofix").joinpath("releases.json").read_text())


def bodies(fix, release):
    """Target path to fingerprint, as in a release."""
    return {
        target.path: next(
            found
            for found, releases in RELEASES["targets"][target.path].items()
            if release in releases
        )
        for target in fix.targets
    }


def judge(fix, body_release, version, force=False):
    return decide(fix, bodies(fix, body_release), version, force=force)


@pytest.mark.parametrize("release", RELEASES["releases"])
@pytest.mark.parametrize("fix", CATALOGUE, ids=lambda fix: fix.name)
def test_every_release_is_decided_by_its_own_bodies(fix, release):
    decision = judge(fix, release, release)
    version = Version(release)
    before = fix.introduced is not None and version < Version(fix.introduced)
    after = fix.fixed is not None and version >= Version(fix.fixed)
    expected = State.NOT_AFFECTED if before else State.FIXED_UPSTREAM if after else State.APPLIED
    assert (decision.state, decision.apply) == (expected, expected is State.APPLIED)


@pytest.mark.parametrize("version", ["0.18.4+abc", "0.18.5.dev0", "0.18.4rc1", "0.16.0.dev1"])
def test_local_and_development_versions_are_within_the_range(version):
    decision = judge(copy_grads.FIX, "0.18.4", version)
    assert decision.apply
    assert decision.reason == f"DeepSpeed {version} has the defect"


@pytest.mark.parametrize("version", ["0.19.2", "1.0", "0.19.0.post1", "unknown", ""])
def test_a_version_that_lies_is_said(version):
    decision = judge(copy_grads.FIX, "0.18.4", version)
    assert decision.apply
    assert "should not have the defect, but the installed source has it" in decision.reason


def test_a_source_that_does_not_tell_is_repaired_where_the_version_does_not_either():
    decision = judge(cpu_adam.FIX, "0.18.4", "vendor")
    assert decision.apply
    assert "releases with the defect and of others without" in decision.reason
    assert judge(cpu_adam.FIX, "0.18.4", "0.19.0").state is State.FIXED_UPSTREAM


def test_a_vendor_backport_is_fixed_upstream():
    decision = judge(copy_grads.FIX, "0.19.0", "0.18.4+vendor")
    assert (decision.apply, decision.state) == (False, State.FIXED_UPSTREAM)


def test_a_body_from_before_the_defect_is_not_affected():
    decision = judge(grad_accumulation.FIX, "0.17.5", "0.17.5")
    assert (decision.apply, decision.state) == (False, State.NOT_AFFECTED)
    assert decision.reason == "the defect came with DeepSpeed 0.17.6"


def test_an_unknown_body_is_not_touched_unless_forced():
    found = bodies(copy_grads.FIX, "0.18.4")
    path = copy_grads.FIX.targets[1].path
    found[path] = "0123456789abcdef"
    decision = decide(copy_grads.FIX, found, "0.18.4", force=False)
    assert (decision.apply, decision.state) == (False, State.UNRECOGNISED)
    assert short(path) in decision.reason
    forced = decide(copy_grads.FIX, found, "0.18.4", force=True)
    assert (forced.apply, forced.state) == (True, State.APPLIED)
    assert forced.reason.startswith("forced: ")


def test_a_target_that_is_absent_cannot_be_forced():
    found = bodies(copy_grads.FIX, "0.18.4") | {copy_grads.FIX.targets[0].path: ABSENT}
    decision = decide(copy_grads.FIX, found, "0.18.4", force=True)
    assert (decision.apply, decision.state) == (False, State.UNRECOGNISED)


def test_half_a_backport_is_not_touched_even_when_forced():
    first, *_ = copy_grads.FIX.targets
    found = bodies(copy_grads.FIX, "0.18.4") | {
        first.path: bodies(copy_grads.FIX, "0.19.0")[first.path]
    }
    decision = decide(copy_grads.FIX, found, "0.18.4", force=True)
    assert (decision.apply, decision.state) == (False, State.UNRECOGNISED)
    assert (
        decision.reason
        == "repaired in part: DeepSpeedZeroOptimizer.copy_grads_in_partition is right already"
    )


def test_the_table_covers_every_target_of_every_fix():
    assert {name: set(paths) for name, paths in known_bodies().items()} == {
        fix.name: {target.path for target in fix.targets} for fix in CATALOGUE
    }


def test_the_table_covers_every_release_once():
    assert len(RELEASES["releases"]) >= 36
    for path, found in RELEASES["targets"].items():
        seen = sorted((r for releases in found.values() for r in releases), key=Version)
        assert seen == RELEASES["releases"], path
