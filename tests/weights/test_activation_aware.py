"""What awq does to a model in memory; whole conversions are in test_conversions.py."""

from tests.weights.converted import run_in_converting_environment


def test_a_tensor_is_set_where_it_is_kept_and_stays_one_with_the_tensor_it_is_tied_to() -> None:
    run_in_converting_environment("set_beside_an_accelerator.py")
