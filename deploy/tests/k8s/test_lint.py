"""The renderings pass the lint, and the lint catches what it is there for."""

import copy

import pytest

import lint_operation  # noqa: F401  (its rules join those of lint)
import render
from lint import RULES, World, lint
from manifests import Manifests
from mutants import MUTANTS, Mutant

# The base is for overlays to complete, the chart's defaults are the base.
WAIVED = {"kustomize base": ["model-cache-outlives-the-pod"], "helm base": ["model-cache-outlives-the-pod"]}


def test_renderings_pass(renderings: dict[str, Manifests], world: World) -> None:
    complaints = {name: lint(m, world, WAIVED.get(name, [])) for name, m in renderings.items()}
    assert not any(complaints.values()), complaints


def test_every_component_is_rendered() -> None:
    taken = {name for folder in render.KUSTOMIZATIONS.values() for name in render.components_of(folder)}
    taken |= {name for _, components in render.OFFERED.values() for name in components}
    assert taken == {folder.name for folder in render.COMPONENTS.iterdir()}


def test_every_rule_has_a_mutant() -> None:
    assert {mutant.rule for mutant in MUTANTS} == RULES.keys()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda it: f"{it.rule}: {it.why}")
def test_mutants_are_caught(mutant: Mutant, renderings: dict[str, Manifests], world: World) -> None:
    good = render.example(renderings, mutant.rendering)
    bad = Manifests(copy.deepcopy(good.objects))
    mutant.change(bad)
    rule = RULES[mutant.rule]
    assert not list(rule(good, world)) and list(rule(bad, world))
