"""
The scenarios, in the order in which they run and are reported.

To add one: a module with a function that measures one server in one round (`Scenario.measure`), and a line here.
"""

from __future__ import annotations

from benchmarks.scenario import Scenario
from benchmarks.scenarios import crowd, def_endpoints, generators, hello, memory, shadows, streams, tenants, waiting

SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        tenants.SCENARIO,
        *hello.SCENARIOS,
        waiting.SCENARIO,
        *streams.SCENARIOS,
        def_endpoints.SCENARIO,
        memory.SCENARIO,
        crowd.SCENARIO,
        *shadows.SCENARIOS,
        *generators.SCENARIOS,
    )
}
