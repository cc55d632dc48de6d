"""A problem that was written down is the same problem when it is read."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from parsl_freetrain.core.allocation.formulation import MOST_POINTS, document_of, problem_of
from parsl_freetrain.core.allocation.problem import Bid, Block, Limit, Problem
from parsl_freetrain.core.allocation.problem_document import check, decode
from parsl_freetrain.core.model.types import ScalingCurve
from parsl_freetrain.solver import allocator_named


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    blocks = tuple(
        Block(
            f'b{i}',
            draw(st.integers(1, 4)),
            draw(st.sampled_from([30.0, 100.0, float('inf')])),
            draw(st.sampled_from(['', 'gpu'])),
        )
        for i in range(draw(st.integers(0, 3)))
    )
    nodes = sum(block.nodes for block in blocks) or draw(st.integers(0, 8))
    left = [block.nodes for block in blocks] or [nodes]
    bids = []
    for i in range(draw(st.integers(0, 3))):
        here = [block.node_class for block in blocks] or ['']
        its_class = draw(st.sampled_from(here))
        held = tuple(
            draw(st.integers(0, n)) if name == its_class else 0
            for n, name in zip(left, here, strict=True)
        )
        left = [n - h for n, h in zip(left, held, strict=True)]
        curve = ScalingCurve((0, 1, 4), (0.0, draw(st.floats(0.5, 9)), draw(st.floats(9, 40))))
        up, down = draw(st.floats(0, 50)), draw(st.floats(0, 50))
        bids.append(
            Bid(
                f't{i}',
                draw(st.integers(0, 2)),
                draw(st.integers(2, 6)),
                sum(held),
                up,
                down,
                curve,
                held if len(blocks) > 1 else (),
                draw(st.sampled_from([(), (2, 4)])),
                fixed=sum(held) > 0 and draw(st.booleans()),
                shortest_s=draw(st.sampled_from([0.0, 50.0])),
                class_curves=tuple((name, curve) for name in dict.fromkeys(here))
                if all(here) and draw(st.booleans())
                else (),
                current_class=its_class if sum(held) else '',
            )
        )
    possible = [
        Limit(most=max(nodes - 1, 0), why='nodes kept free'),
        Limit(most=3, why='max_nodes'),
        *(Limit((bid.name,), most=2, why='user anna') for bid in bids[:1]),
        *(Limit((bid.name,), node_s=150.0, why='group lab') for bid in bids[:1]),
        *(Limit((bid.name,), least=1, why='share of user bert') for bid in bids[1:2]),
        *(Limit((bid.name,), least=1, why=f'share of trainer {bid.name}') for bid in bids[:1]),
    ]
    limits = tuple(draw(st.lists(st.sampled_from(possible), max_size=3, unique=True)))
    return Problem(
        120.0, nodes, tuple(bids), blocks, draw(st.booleans()) if blocks else True, limits
    )


@settings(max_examples=60, deadline=None)
@given(problems())
def test_what_is_read_is_what_was_written(problem: Problem) -> None:
    document = document_of(problem)
    assert document is not None
    read = problem_of(check(decode(json.dumps(document))))
    assert (read.nodes, read.blocks, read.spans_blocks, read.horizon_s) == (
        problem.nodes,
        problem.blocks,
        problem.spans_blocks,
        problem.horizon_s,
    )
    assert {
        limit.most for limit in read.limits if limit.why != 'nodes kept free' or problem.nodes
    } <= {limit.most for limit in problem.limits}
    assert {(limit.why, limit.members) for limit in read.limits if limit.members} == {
        (limit.why, limit.members) for limit in problem.limits if limit.members
    }
    assert [
        (b.name, problem.held(a), a.fixed) for a, b in zip(problem.bids, read.bids, strict=True)
    ] == [(b.name, read.held(b), b.fixed) for b in read.bids]
    allocator = allocator_named('auto', isolated=False)
    one, other = allocator.allocate(problem), allocator.allocate(read)
    assert one.status == other.status
    assert abs(one.objective - other.objective) <= 1e-6 * max(1.0, abs(one.objective))


def test_what_cannot_be_said_is_not_said() -> None:
    bid = Bid('a', 1, 2, 0, 0, 0, ScalingCurve((0, 1), (0.0, 1.0)))
    assert document_of(Problem(1.0, 2, (bid,), limits=(Limit(('a',), least=1),))) is None
    wide = ScalingCurve(tuple(range(MOST_POINTS + 2)), tuple(map(float, range(MOST_POINTS + 2))))
    assert document_of(Problem(1.0, 2, (Bid('a', 1, 2, 0, 0, 0, wide),))) is None
