"""python -m rmvdb"""

from rmvdb.cli.main import main

if __name__ == "__main__":
    main()
