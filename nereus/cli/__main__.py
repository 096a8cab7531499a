"""`python -m nereus.cli`, for where the script is not on the path."""

from nereus.cli.app import main

main()
