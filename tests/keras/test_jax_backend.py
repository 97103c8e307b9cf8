"""The Keras room on the jax backend."""

from tests.keras.suite import run_tests


def test_the_tests_of_the_keras_room_pass_on_jax():
    assert run_tests("jax", "backends") > 50
