"""`python -m alignedserve`: the command line where the package is a checkout and not installed."""

from alignedserve.cli.main import main

if __name__ == "__main__":
    main()
