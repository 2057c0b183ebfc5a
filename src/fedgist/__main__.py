"""``python -m fedgist`` is the same as ``fedgist``."""

from fedgist.cli import main

main()
