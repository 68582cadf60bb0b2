"""Which defects a training meets, from the release of DeepSpeed and the configuration alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from zerofix.config import Training, Unresolved
from zerofix.fix import Fix
from zerofix.gate import has_defect
from zerofix.patches import CATALOGUE


@dataclass(frozen=True)
class Hit:
    """A defect that a training meets, or may meet."""

    fix: Fix
    certain: bool
    when: tuple[str, ...]
    """The conditions, any of which is enough, where it is not certain."""

    @property
    def since(self) -> str:
        return f"since {self.fix.introduced}" if self.fix.introduced else "before 0.16.0 already"

    @property
    def until(self) -> str:
        return f"right in {self.fix.fixed}" if self.fix.fixed else "right in no release"

    def as_dict(self) -> dict[str, Any]:
        """The same as plain data, for JSON."""
        record = asdict(self.fix)
        names = (
            "name",
            "title",
            "symptom",
            "upstream",
            "introduced",
            "fixed",
            "limits",
        )
        found = {name: record[name] for name in names}
        return found | {"certain": self.certain, "when": self.when}


def audit(training: Training) -> list[Hit]:
    """The defects of the catalogue that ``training`` meets, the certain ones first.

    Raises:
        ConfigError: a value that a fix asks for is none.
    """
    affected = [fix for fix in CATALOGUE if has_defect(fix, str(training.deepspeed))]
    hits = [hit for fix in affected if (hit := _hit(fix, training))]
    return sorted(hits, key=lambda hit: not hit.certain)


def _hit(fix: Fix, training: Training) -> Hit | None:
    answers = list(_answers(fix, training, {}))
    different = {answer for _, answer in answers}
    if different == {True}:
        return Hit(fix, certain=True, when=())
    when = []
    for names, answer in answers:
        # What became of an open value is said where it matters.
        words = [f"with {path} = {name}" for path, name in names.items() if len(different) > 1]
        if answer:
            when.append(", ".join([*words, answer] if isinstance(answer, str) else words))
    return Hit(fix, certain=False, when=tuple(dict.fromkeys(when))) if when else None


def _answers(
    fix: Fix, training: Training, names: Mapping[str, str]
) -> Iterator[tuple[Mapping[str, str], bool | str]]:
    """The fix's answer for all that unresolved values may become, with what they became."""
    try:
        yield names, fix.hit_by(training)
    except Unresolved as open_value:
        for name, value in open_value.values.items():
            chosen = {**training.chosen, open_value.path: value}
            more = {**names, open_value.path: name}
            yield from _answers(fix, replace(training, chosen=chosen), more)
