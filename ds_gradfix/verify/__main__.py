"""`python -m ds_gradfix.verify`: the command `ds-gradfix verify`."""

import sys

from ds_gradfix.cli import main

sys.exit(main(["verify", *sys.argv[1:]]))
