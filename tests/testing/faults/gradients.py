"""Faults 52 to 73: auxiliary outputs and gradients."""

from __future__ import annotations

from tests.testing.faults.fault import Change, Fault

__all__ = ["FAULTS"]

LSE = "lse = _finite_shift(maximum) + total.log()"
SCATTERS = "for position, indices, gradient in scatters:"
MASKED = "gradient = gradient.expand(live.shape).masked_fill(~live, 0)"
DK = "part = _product(passed.mT, query, alive.mT) * call.scale"
DV = "part = _product(weights.mT, dout, alive.mT)"
WEIGHTS = "weights = torch.exp(scores - lse).masked_fill(~alive, 0)"
NEW_TOTAL = "total = torch.zeros_like(maximum)"

FAULTS = (
    Fault(
        52,
        "lse in base 2",
        case="aux/lse_of_two_keys",
        says="lse is ",
        changes=(
            Change("kernel.py", LSE, LSE + "\n                lse = lse / 0.6931471805599453"),
        ),
    ),
    Fault(
        53,
        "lse before the mod or the mask",
        case="aux/lse_after_mods",
        says="lse is ",
        changes=(
            Change("kernel.py", NEW_TOTAL, NEW_TOTAL + "\n            plain = 0"),
            Change("kernel.py", "scores, _, _ = self._scores", "scores, _, pairs = self._scores"),
            Change(
                "kernel.py",
                "maximum = higher",
                "maximum = higher\n"
                '                plain += pairs.inputs["score"].exp().sum(-1, keepdim=True)',
            ),
            Change("kernel.py", LSE, "lse = plain.log()"),
        ),
    ),
    Fault(
        54,
        "lse in q's dtype",
        case="aux/lse_digits",
        says="lse is ",
        changes=(
            Change("kernel.py", LSE, LSE + "\n                lse = lse.to(self.spec.dtype)"),
        ),
    ),
    Fault(
        55,
        "max_scores of all tiles but the last",
        case="aux/max_scores_in_the_last_tile",
        says="max_scores is ",
        changes=(
            Change("kernel.py", NEW_TOTAL, NEW_TOTAL + "\n            earlier = maximum"),
            Change(
                "kernel.py",
                "maximum = higher",
                "earlier = maximum if keys.start else higher\n                maximum = higher",
            ),
            Change("kernel.py", "copy_(maximum.squeeze(-1))", "copy_(earlier.squeeze(-1))"),
        ),
    ),
    Fault(
        56,
        "dlse ignored",
        case="gradients/of_lse",
        says="dq is ",
        changes=(Change("kernel.py", "if grad.dlse is not None:", "if False:"),),
    ),
    Fault(
        57,
        "dlse added with the wrong sign",
        case="gradients/of_out_and_lse",
        says="dq is ",
        changes=(
            Change(
                "kernel.py",
                "delta = delta - dlse.masked_fill(dead, 0)",
                "delta = delta + dlse.masked_fill(dead, 0)",
            ),
        ),
    ),
    Fault(
        58,
        "delta uses out rounded to q's dtype",
        case="precision/delta",
        says="dq is ",
        changes=(
            Change(
                "kernel.py",
                "out = saved.extras[0] if saved.extras else saved.out",
                "out = saved.out",
            ),
        ),
    ),
    Fault(
        59,
        "dk misses the sum over the query heads of a group",
        case="gradients/grouped_heads",
        says="dk is ",
        changes=(
            Change(
                "kernel.py",
                "_add_shared(tile.of_keys(dk, keys), part)",
                "_add_shared(tile.of_keys(dk, keys), part[:, :, :1])",
            ),
        ),
    ),
    Fault(
        60,
        "dv computed from unnormalised P",
        case="gradients/small",
        says="dv is ",
        changes=(
            Change(
                "kernel.py",
                DV,
                "exps = torch.exp(scores - _finite_shift(scores.amax(-1, keepdim=True)))\n"
                "                    part = _product(exps.mT, dout, alive.mT)",
            ),
        ),
    ),
    Fault(
        61,
        "dq, dk miss the scale",
        case="gradients/scale",
        says="dq is .*dk is ",
        changes=(
            Change("kernel.py", DK, DK.replace(" * call.scale", "")),
            Change(
                "kernel.py",
                "dq += _product(passed, key, alive) * call.scale",
                "dq += _product(passed, key, alive)",
            ),
        ),
    ),
    Fault(
        62,
        "derivative of the mod taken as 1",
        case="mods/softcap",
        says="dq is ",
        changes=(
            Change(
                "kernel.py",
                "passed, scatters = self.score_mod_backward(pairs)",
                "passed, scatters = dscores, self.score_mod_backward(pairs)[1]",
            ),
        ),
    ),
    Fault(
        63,
        "dk, dv not summed over batch with B_kv = 1",
        case="gradients/one_key_batch",
        says="dk is .*dv is ",
        changes=(
            Change(
                "kernel.py",
                "part.sum(2).sum_to_size(total.shape)",
                "part.sum(2)[: len(total)]",
            ),
        ),
    ),
    Fault(
        64,
        "captured gradient: second read overwrites the first",
        case="mods/bias_twice",
        says="(^|; )w is ",
        changes=(
            Change(
                "kernel.py",
                SCATTERS,
                "for position, indices, gradient in {s[0]: s for s in scatters}.values():",
            ),
        ),
    ),
    Fault(
        65,
        "captured gradient lost for 0-d tensors",
        case="mods/scalar_learned",
        says="(^|; )t is 0 ",
        changes=(
            Change(
                "mods.py",
                "            total += gradient.sum(dtype=total.dtype)",
                "            return",
            ),
        ),
    ),
    Fault(
        66,
        "captured gradient counts dead pairs",
        case="gradients/captured_under_mask",
        says="(^|; )slope is ",
        changes=(
            Change(
                "kernel.py",
                MASKED,
                MASKED + "\n            gradient = gradient.where(live, gradient.mean(-1, True))",
            ),
        ),
    ),
    Fault(
        67,
        "captured gradient laid out as if the view were contiguous",
        case="mods/bias_transposed",
        says="(^|; )base is ",
        changes=(
            Change(
                "kernel.py",
                "accumulator += total",
                "if not call.captured[position].is_contiguous():\n"
                "                total = total.mT.reshape(total.shape)\n"
                "            accumulator += total",
            ),
        ),
    ),
    Fault(
        68,
        "captured gradient summed in bf16",
        case="gradients/many_additions",
        says="(^|; )w is ",
        changes=(
            Change(
                "kernel.py",
                "TensorSpec(tuple(tensor.shape), torch.float64, zeroed=True)",
                "TensorSpec(tuple(tensor.shape), torch.bfloat16, zeroed=True)",
            ),
        ),
    ),
    Fault(
        69,
        "gradients of dead rows left unwritten",
        case="gradients/padding",
        says="elements of dq were not written",
        changes=(
            Change(
                "kernel.py",
                "            if grads.dq is not None:\n                tile.of_rows(grads.dq",
                "            if grads.dq is not None and tile.pieces:\n"
                "                tile.of_rows(grads.dq",
            ),
        ),
    ),
    Fault(
        70,
        "mod without s gives a random dq",
        case="mods/ignores_score",
        says="dq is .* wanted (-)?0:",
        changes=(
            Change(
                "kernel.py",
                "return None if passed is None else",
                "return dscores if passed is None else",
            ),
        ),
    ),
    Fault(
        71,
        "-inf score: gradient 0 * inf = NaN",
        case="gradients/infinite_scores",
        says="dv is nan ",
        changes=(Change("kernel.py", WEIGHTS, WEIGHTS + " + 0 * scores.masked_fill(~live, 0)"),),
    ),
    Fault(
        72,
        "gradients of inputs that don't need them are computed",
        case="gradients/nothing_unasked",
        says="bytes of workspace where only value needs a gradient",
        changes=(
            Change("kernel.py", "            if name in self.spec.gradients\n", ""),
            Change(
                "kernel.py", "dk = None if grads.dk is None else next(sums)", "dk = next(sums)"
            ),
            Change(
                "kernel.py", "dv = None if grads.dv is None else next(sums)", "dv = next(sums)"
            ),
        ),
    ),
    Fault(
        73,
        "backward misses a column that is live only in the last q block",
        case="structure/per_batch_columns",
        says="dk is ",
        changes=(
            Change(
                "kernel.py",
                "dq = torch.zeros_like(query)\n            for keys, partial in tile.pieces:",
                "dq = torch.zeros_like(query)\n"
                "            last = call.mask is not None"
                " and tile.rows.stop == call.query.shape[2] > 16\n"
                "            for keys, partial in tile.pieces[: -1 if last else None]:",
            ),
        ),
    ),
)
