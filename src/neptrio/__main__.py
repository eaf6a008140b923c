from neptrio import process_start


def main() -> int:
    """The program, as a command and as `python -m neptrio`."""
    process_start.open_streams()
    process_start.end_at_signals()
    from neptrio import cli

    return cli.main()


if __name__ == "__main__":
    raise SystemExit(main())
