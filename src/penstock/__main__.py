"""``python -m penstock`` is the command ``penstock``."""

from penstock.cli import main

raise SystemExit(main())
