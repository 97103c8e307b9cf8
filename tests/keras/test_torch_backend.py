"""The Keras room on the torch backend."""

from tests.keras.suite import run_tests


def test_the_tests_of_the_keras_room_pass_on_torch():
    assert run_tests("torch", "backends") > 50
