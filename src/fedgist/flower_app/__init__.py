"""The app folder for `flwr run`, and what starts it and tells truthfully how it ended.

This folder is what Flower packs and sends to the nodes; it holds names only. The work is done by
the FedGist that is installed there.
"""
