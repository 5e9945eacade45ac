"""What stands beside a service in these tests: a client in its process, lost calls, a clock."""

import tensorflow as tf

from keras_het.asynchronous.parameter_service import ParameterClient
from keras_het.rpc.channel import LocalChannel


def client_within(service, client=0):
    channels = [LocalChannel(service._server)]
    return ParameterClient(service.address, service.partitions, b"", client, channels=channels)


def exchange_within(service, client, samples, changes):
    """Pushes from the version that the service has; the values of the answer."""
    own = client_within(service, client)
    return own.push(changes, service.versions(), samples, changes).partitions


class LostCall:
    """A call whose answer never came."""

    def is_ok(self):
        return tf.constant(False)

    def get_error(self):
        return tf.constant(4), tf.constant("deadline exceeded")


class Clock:
    """Time that passes as it is slept."""

    now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
