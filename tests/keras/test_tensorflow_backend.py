"""The Keras room on the tensorflow backend."""

from tests.keras.suite import run_tests


def test_the_tests_of_the_keras_room_pass_on_tensorflow():
    assert run_tests("tensorflow", "backends", "tensorflow") > 50
