"""Arguments of `mlx-marlin plan`: the problem, the device and fields of the plan."""

import argparse

from mlx_marlin.backends import registry
from mlx_marlin.cli import arguments
from mlx_marlin.planning.epilogue import ACTIVATIONS, Epilogue
from mlx_marlin.planning.explicit import PlanOverrides
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import REDUCTIONS
from mlx_marlin.planning.work.work import PARTITIONS, STRATEGIES


def add_problem(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the product that is planned."""
    group = parser.add_argument_group("product")
    arguments.add_format(group)
    arguments.add_dtype(group)
    arguments.add_layout(group, default="mlx")
    group.add_argument(
        "--batch", type=int, default=1, help="products with different weights"
    )
    group.add_argument(
        "--invariant",
        action="store_true",
        help="require results of a row that do not depend on M",
    )
    epilogue = parser.add_argument_group("epilogue")
    epilogue.add_argument("--bias", action="store_true", help="add a bias")
    epilogue.add_argument(
        "--activation", default="none", choices=ACTIVATIONS, help="default: none"
    )
    epilogue.add_argument(
        "--multiply", action="store_true", help="multiply by an array"
    )
    epilogue.add_argument(
        "--residual", action="store_true", help="add an array at the end"
    )


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Adds the options that set fields of the plan."""
    group = parser.add_argument_group("overrides of the plan")
    group.add_argument("--kernel", choices=registry.kernels(), help="the kernel")
    group.add_argument(
        "--strategy", choices=STRATEGIES, help="how tiles and k are divided"
    )
    group.add_argument("--partition", choices=PARTITIONS, help="how ranges are rounded")
    group.add_argument("--k-parallel", type=int, help="slices of k")
    group.add_argument(
        "--threadgroups", type=int, dest="num_threadgroups", help="threadgroups"
    )
    group.add_argument("--whole", type=int, help="leading tiles that are not split")
    group.add_argument("--minimum", type=int, help="minimum k tiles of a split")
    group.add_argument("--groups", type=int, help="groups of neighbouring ranges")
    group.add_argument(
        "--reduction", choices=REDUCTIONS, help="how splits of a tile are added"
    )
    group.add_argument("--simdgroups-k", type=int, help="simdgroups that share k")
    group.add_argument("--simdgroups-n", type=int, help="tiles in a wide tile of hytis")
    group.add_argument("--buffers", type=int, help="pipeline stages of gemm_staged")
    group.add_argument(
        "--loaders", type=int, help="simdgroups of gemm_staged that only load"
    )


def problem(args: argparse.Namespace) -> Problem:
    """Returns the product that the arguments describe."""
    m, n, k = arguments.product("x".join(args.shape))
    return arguments.problem(
        args,
        *(m, n, k),
        args.layout or "mlx",
        epilogue=Epilogue(
            bias=args.bias,
            activation=args.activation,
            multiply=args.multiply,
            residual=args.residual,
        ),
        invariant=args.invariant,
        batch=args.batch,
    )


def overrides(args: argparse.Namespace) -> PlanOverrides:
    """Returns the fields of the plan that the arguments set."""
    overrides = PlanOverrides()
    for field in PlanOverrides.__optional_keys__ & vars(args).keys():
        if (value := getattr(args, field)) is not None:
            overrides[field] = value  # type: ignore[literal-required]
    return overrides
