"""``python -m foredraft`` is the ``foredraft`` command."""

from foredraft.cli.main import main

main()
