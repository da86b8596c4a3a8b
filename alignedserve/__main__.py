"""The command line: `alignedserve`, or `python -m alignedserve` where the package is a checkout and not installed."""

import sys

try:
    from alignedserve.cli.main import main
except KeyboardInterrupt:  # Ctrl-C while it loads; later ones are handled there
    sys.exit(130)

if __name__ == "__main__":
    main()
