"""The score: which planted bugs were noticed, and by what."""

from _pytest.terminal import TerminalReporter


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """Prints a line for each mutant and how many were caught."""
    rows = sorted(_rows(terminalreporter))
    if not rows:
        return
    terminalreporter.section("planted bugs")
    width = max(len(mutant) for mutant, _, _ in rows)
    for mutant, caught_by, caught in rows:
        verdict = caught_by if caught else f"NOT CAUGHT by: {caught_by}"
        terminalreporter.write_line(f"{mutant.ljust(width)}  {verdict}")
    score = sum(caught for _, _, caught in rows)
    terminalreporter.write_line(f"\n{score} of {len(rows)} caught")


def _rows(terminalreporter: TerminalReporter) -> list[tuple[str, str, bool]]:
    """Name, detector, and whether it noticed; the workers' reports are among them."""
    rows = []
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            properties = dict(report.user_properties)
            if report.when == "call" and "mutant" in properties:
                mutant, caught_by = properties["mutant"], properties["caught_by"]
                rows.append((str(mutant), str(caught_by), outcome == "passed"))
    return rows
