"""Run a method of your own, `mine/centroids.py`, beside one that ships with FedGist.

python examples/own_method.py
"""

from fedgist import execute, load

SETTINGS = ["data.source=digits", "data.clients=3", "privacy.epsilon=3"]


def main() -> None:
    """Print the claim, the bytes and the accuracy of both."""
    for name, more in (
        ("mine.centroids", []),  # a module that Python finds, with a dot in its name
        ("fedkt_csd", ["method.heads=['lda']", "method.features=scattering:64"]),
    ):
        report = execute(load(None, [*SETTINGS, f"method.name={name}", *more])).report
        print(f"{name}: {report['claim']['line']}; {report['bytes_up']:,} bytes per client")
        for head, score in report["heads"].items():
            print(f"  {head}: {score['accuracy']:.3f}")


if __name__ == "__main__":
    main()
