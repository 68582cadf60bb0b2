from zerofix.cli import main

main()
