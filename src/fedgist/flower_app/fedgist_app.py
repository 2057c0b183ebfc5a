"""What `flwr run` sends out: which functions of the installed FedGist to call."""

from fedgist.exchange.flower import client_app, server_app
from fedgist.flower_app.coordinator import coordinate_over
from fedgist.flower_app.switches import warn_if_on

warn_if_on()
client = client_app()
server = server_app(coordinate_over)
