"""What `mlx-marlin plan` prints of a choice."""

from mlx_marlin.backends import registry
from mlx_marlin.cli.pictures import text
from mlx_marlin.planning.choice import Choice


def explanation(choice: Choice) -> str:
    """Returns everything except the diagrams, as lines of text."""
    chip = choice.device
    lines = [
        f"problem   {choice.plan.problem.explain()}",
        f"device    {chip.variant}: {chip.figures}",
        f"plan      {choice.plan.explain()}",
        f"cost      {choice.prediction.explain()}",
        f"stock     {_stock(choice)}",
        f"served by {_server(choice)}",
    ]
    return "\n".join(lines)


def _stock(choice: Choice) -> str:
    if choice.stock is None:
        return "no model of stock MLX on this device"
    text: str = choice.stock.explain()
    return text.removeprefix("stock MLX: ")


def _server(choice: Choice) -> str:
    """Returns who serves the product and why."""
    problem = choice.plan.problem
    if choice.reason:
        return f"stock MLX: {choice.reason} (model, not measured)"
    if choice.stock is None:
        return "this plan"
    if problem.layout != "mlx":
        return "this plan: stock MLX cannot read a packed weight"
    if problem.invariant:
        return "this plan: stock MLX's bits of a row depend on the number of rows"
    stock = registry.of_device(choice.device).stock_seconds(problem, choice.device)
    if stock is None:
        return "this plan"
    ratio = stock / choice.prediction.seconds
    kernel = choice.stock.call.kernel
    return f"this plan: {ratio:.2f} times as fast as {kernel} (model, not measured)"


def pictures(choice: Choice) -> str:
    """Returns the diagrams of a plan as text, or why it is not drawn."""
    too_large = text.why_not_drawn(choice.plan)
    if too_large is not None:
        return too_large
    return f"{text.tile_map(choice.plan)}\n\n{text.timeline(choice)}"


def heading(choice: Choice) -> str:
    """Returns the heading of the diagrams of a strategy's best plan."""
    seconds = choice.prediction.seconds
    return (
        f"# {choice.plan.strategy}, {seconds * 1e6:.1f} us (model, not measured)\n"
        f"{choice.plan.explain()}"
    )
