"""Plans as they are drawn, and the texts of pictures."""

from pathlib import Path
from xml.etree import ElementTree

from mlx_marlin.backends.metal.device import DEFAULT, Device
from mlx_marlin.backends.planner import predict
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.search import Choice


def chosen(plan: Plan, device: Device = DEFAULT) -> Choice:
    """Returns a plan as if it had been chosen."""
    return Choice(
        plan=plan,
        device=device,
        prediction=predict(plan, device),
        reason=None,
        candidates=(),
    )


def svg_texts(path: Path) -> list[str]:
    """Returns the texts of an SVG file."""
    tree = ElementTree.parse(path)
    return [each.text or "" for each in tree.iter("{http://www.w3.org/2000/svg}text")]
