"""python -m rmvdb"""

from rmvdb.cli import main

if __name__ == "__main__":
    main()
