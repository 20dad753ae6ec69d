import pytest
import torch

from serving.engine.linear import MAX_ROWS, PackedLinear, RowRule, apply_linear, make_linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_layer_is_the_product_with_the_transposed_weight(dtype: torch.dtype) -> None:
    weight, rows = torch.randn(96, 48).to(dtype), torch.randn(5, 48).to(dtype)

    out = make_linear(weight)(rows)

    expected = rows.double() @ weight.double().T
    assert out.dtype is dtype
    torch.testing.assert_close(out.double(), expected, rtol=2**-8 if dtype is torch.bfloat16 else 1e-5, atol=1e-4)


def test_bfloat16_without_hardware_rounds_the_float32_product_once() -> None:
    weight, rows = torch.randn(96, 48).bfloat16(), torch.randn(5, 48).bfloat16()

    out = PackedLinear(weight.float())(rows)

    assert torch.equal(out, PackedLinear(weight.float())(rows.float()).bfloat16())


def test_a_step_larger_than_one_call_is_cut_and_joined_in_order() -> None:
    linear = make_linear(torch.randn(24, 16))
    rows = torch.randn(2 * MAX_ROWS + 8, 16)

    out = apply_linear(linear, rows, RowRule(8, MAX_ROWS))

    expected = torch.cat([linear(rows[:MAX_ROWS]), linear(rows[MAX_ROWS : 2 * MAX_ROWS]), linear(rows[2 * MAX_ROWS :])])
    assert torch.equal(out, expected)
